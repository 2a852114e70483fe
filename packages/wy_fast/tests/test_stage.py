"""The tests that all stages have."""

from chunkwise.shared.testing import stage_oracle
from chunkwise.shared.testing.inputs import spec
from chunkwise.wy_fast import Config, recompute_w_u
from tests import stage_suite as stages


class TestStage(stages.StageTests, stages.GateTests):
    stage = stages.StageSpec(
        function=recompute_w_u,
        arguments=("k", "v", "beta", "A_inv", "g_cum"),
        results=("w", "u"),
        definition=stage_oracle.w_u,
        costs=(stages.CostSpec(backward=2),),
        gradient_sizes=(dict(T=17, HV=1, V=1), dict(T=17, HV=1, V=1, lengths=(1, 0, 15))),
        configs=tuple(Config(heads) for heads in (1, 2, 4, 8)),
        wrong=(
            (dict(k=spec(2, 64, 8)), "`k` must have shape [B, T, H, K]; got (2, 64, 8)."),
            (dict(v=spec(2, 63, 4, 6)), "`v` must have shape [B, T, HV, V] = (2, 64, any, any); got (2, 63, 4, 6)."),
            (dict(v=spec(2, 64, 3, 6)),
             "`v` must have a multiple of the heads of `k`; got 3 value heads for 2 key heads."),
            (dict(beta=spec(2, 64, 2)), "`beta` must have shape [B, T, HV] = (2, 64, 4); got (2, 64, 2)."),
            (dict(A_inv=spec(2, 64, 2, 32)),
             "`A_inv` must have shape [B, T, HV, C] = (2, 64, 4, any); got (2, 64, 2, 32)."),
            (dict(A_inv=spec(2, 64, 4, 48)), "`A_inv` must have a last dimension of one of (16, 32, 64, 128); got 48."),
            (dict(g_cum=spec(2, 64)), "`g_cum` must have shape [B, T, HV]; got (2, 64)."),
        ),
    )  # fmt: skip
