"""The tests that all stages have."""

import jax.numpy as jnp

from chunkwise.chunk_o import Config, chunk_fwd_o
from chunkwise.shared.testing import stage_oracle
from chunkwise.shared.testing.inputs import spec
from tests import stage_suite as stages


class TestStage(stages.StageTests, stages.GateTests, stages.ChunkSizeTests):
    stage = stages.StageSpec(
        function=chunk_fwd_o,
        arguments=("q", "k", "v", "h", "g_cum"),
        results=("o",),
        definition=stage_oracle.output,
        costs=(stages.CostSpec(), stages.CostSpec(dict(per_channel=True), documented=dict(H=6))),
        # The one stage whose result is in the type of its values: v_new is float32 whatever the inputs are.
        renamed=dict(v="v_new"),
        shared=dict(scale=jnp.float32(0.3)),
        gradient_sizes=({}, dict(HV=1, T=18, lengths=(1, 0, 17))),
        configs=tuple(Config(heads) for heads in (1, 2, 4, 8)),
        tpu_types=dict(v="bfloat16"),
        wrong=(
            (dict(k=spec(2, 64, 8)), "`k` must have shape [B, T, H, K]; got (2, 64, 8)."),
            (dict(q=spec(2, 64, 4, 8)), "`q` must have shape [B, T, H, K] = (2, 64, 2, 8); got (2, 64, 4, 8)."),
            (dict(v=spec(2, 63, 4, 6)), "`v` must have shape [B, T, HV, V] = (2, 64, any, any); got (2, 63, 4, 6)."),
            (dict(v=spec(2, 64, 3, 6)),
             "`v` must have a multiple of the heads of `k`; got 3 value heads for 2 key heads."),
            (dict(h=spec(2, 2, 4, 8, 6)),
             "`h` must have shape [B, NT, HV, K, V] = (2, 1, 4, 8, 6); got (2, 2, 4, 8, 6)."),
            (dict(g_cum=spec(2, 64, 2)), "`g_cum` must have shape [B, T, HV] = (2, 64, 4); got (2, 64, 2)."),
            (dict(g_gamma=spec(2)), "`g_gamma` must have shape [HV] = (4); got (2,)."),
            (dict(scale=jnp.ones(6)), "`scale` must be None, a number or a scalar array; got "),
        ),
    )  # fmt: skip
