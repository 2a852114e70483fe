"""What is not finite in one sequence leaves every bit of the others, and padding may hold anything."""

import pytest

from chunkwise.shared.testing.cases import ISOLATION_CASES
from chunkwise.shared.testing.poison import assert_isolated
from chunkwise.wy_fast import recompute_w_u


@pytest.mark.parametrize(
    ("gates", "implementation"),
    [
        ("g_cum", "xla"),
        ("g_cum", "pallas"),
        ("gk_cum", "pallas"),
        pytest.param("gk_cum", "xla", marks=pytest.mark.thorough),
    ],
)
@pytest.mark.parametrize("case", ISOLATION_CASES, ids=str)
def test_isolated(case, gates, implementation):
    names = ["k", "v", "beta", "A_inv", gates]

    def run(x, cu_seqlens):
        results = recompute_w_u(*(x[name] for name in names), cu_seqlens, implementation=implementation)
        return dict(zip("wu", results, strict=True))

    assert_isolated(run, case.finite_arguments(*names), case.cu_seqlens)
