"""The tests that all stages have."""

import jax.numpy as jnp

from chunkwise.chunk_o import Config, chunk_fwd_o
from chunkwise.chunk_o.config import cost
from chunkwise.shared.testing import stage_oracle
from tests import stage_suite as stages


class TestStage(stages.StageTests, stages.GateTests, stages.ChunkSizeTests):
    stage = stages.StageSpec(
        function=chunk_fwd_o,
        arguments=("q", "k", "v", "h", "g_cum"),
        results=("o",),
        definition=stage_oracle.output,
        cost=cost,
        costs=(stages.CostSpec(), stages.CostSpec(dict(per_channel=True), documented=dict(H=6))),
        # The one stage whose result is in the type of its values: v_new is float32 whatever the inputs are.
        renamed=dict(v="v_new"),
        shared=dict(scale=jnp.float32(0.3)),
        gradient_sizes=({}, dict(HV=1, T=18, lengths=(1, 0, 17))),
        configs=tuple(Config(heads) for heads in (1, 2, 4, 8)),
        tpu_types=dict(v="bfloat16"),
    )
