"""What is not finite in one sequence leaves every bit of the others, and padding may hold anything."""

import pytest

from chunkwise.kkt import chunk_scaled_dot_kkt
from chunkwise.shared.testing.cases import ISOLATION_CASES
from chunkwise.shared.testing.poison import assert_isolated


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
    names = ["k", "beta", gates]

    def run(x, cu_seqlens):
        operands = (x[name] for name in names)
        return dict(A=chunk_scaled_dot_kkt(*operands, cu_seqlens, 16, implementation=implementation))

    # Strong gates hide a sequence's first key: all that reads it is decayed to zero.
    assert_isolated(run, case.finite_arguments(*names), case.cu_seqlens)
