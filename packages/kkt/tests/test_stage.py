"""The tests that all stages have, and what the kernel leaves out of its products."""

import numpy as np

from chunkwise.kkt import Config, chunk_scaled_dot_kkt
from chunkwise.shared.testing import stage_oracle
from chunkwise.shared.testing.cases import Case
from chunkwise.shared.testing.inputs import spec
from tests import stage_suite as stages


class TestStage(stages.StageTests, stages.GateTests, stages.ChunkSizeTests):
    stage = stages.StageSpec(
        function=chunk_scaled_dot_kkt,
        arguments=("k", "beta", "g_cum"),
        results=("A",),
        definition=stage_oracle.kkt,
        # The gradient takes the scores of the key heads once more, and two products for every value head.
        costs=(
            stages.CostSpec(backward=5),
            stages.CostSpec(dict(per_channel=True), documented=dict(H=6), backward=3),
        ),
        configs=tuple(Config(heads) for heads in (1, 2, 4, 8)),
        wrong=(
            (dict(k=spec(2, 64, 8)), "`k` must have shape [B, T, H, K]; got (2, 64, 8)."),
            (dict(beta=spec(2, 63, 4)), "`beta` must have shape [B, T, HV] = (2, 64, any); got (2, 63, 4)."),
            (dict(beta=spec(2, 64, 3)),
             "`beta` must have a multiple of the heads of `k`; got 3 value heads for 2 key heads."),
            (dict(g_cum=spec(2, 64, 2)), "`g_cum` must have shape [B, T, HV] = (2, 64, 4); got (2, 64, 2)."),
        ),
    )  # fmt: skip


def test_strictly_lower_and_finite_where_the_decay_above_the_diagonal_overflows():
    x = Case(T=64, K=8, gate="strong").arguments()
    A = chunk_scaled_dot_kkt(x["k"], x["beta"], x["g_cum"], implementation="pallas")
    assert np.isfinite(A).all()
    assert not np.triu(A[0, :, 0]).any()
