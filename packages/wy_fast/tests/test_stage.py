"""The tests that all stages have."""

from chunkwise.shared.testing import stage_oracle
from chunkwise.wy_fast import Config, recompute_w_u
from chunkwise.wy_fast.config import cost
from tests import stage_suite as stages


class TestStage(stages.StageTests, stages.GateTests):
    stage = stages.StageSpec(
        function=recompute_w_u,
        arguments=("k", "v", "beta", "A_inv", "g_cum"),
        results=("w", "u"),
        definition=stage_oracle.w_u,
        cost=cost,
        costs=(stages.CostSpec(backward=2),),
        gradient_sizes=(dict(T=17, HV=1, V=1), dict(T=17, HV=1, V=1, lengths=(1, 0, 15))),
        configs=tuple(Config(heads) for heads in (1, 2, 4, 8)),
    )
