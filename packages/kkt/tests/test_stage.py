"""The tests that all stages have."""

from chunkwise.kkt import Config, chunk_scaled_dot_kkt
from chunkwise.kkt.config import cost
from chunkwise.shared.testing import stage_oracle
from tests import stage_suite as stages


class TestStage(stages.StageTests, stages.GateTests, stages.ChunkSizeTests):
    stage = stages.StageSpec(
        function=chunk_scaled_dot_kkt,
        arguments=("k", "beta", "g_cum"),
        results=("A",),
        definition=stage_oracle.kkt,
        cost=cost,
        # The gradient takes the scores of the key heads once more, and two products for every value head.
        costs=(
            stages.CostSpec(backward=5),
            stages.CostSpec(dict(per_channel=True), documented=dict(H=6), backward=3),
        ),
        configs=tuple(Config(heads) for heads in (1, 2, 4, 8)),
    )
