"""What is not finite in one sequence leaves every bit of the others, and padding may hold anything."""

import pytest

from chunkwise.cumsum import chunk_local_cumsum
from chunkwise.shared.testing.cases import ISOLATION_CASES
from chunkwise.shared.testing.poison import assert_isolated


@pytest.mark.parametrize("implementation", ["xla", "pallas"])
@pytest.mark.parametrize("reverse", [False, True], ids=["forward", "reverse"])
@pytest.mark.parametrize("case", ISOLATION_CASES, ids=str)
def test_isolated(case, reverse, implementation):
    def run(x, cu_seqlens):
        return dict(g_cum=chunk_local_cumsum(x["g"], 16, reverse, cu_seqlens, implementation=implementation))

    assert_isolated(run, case.finite_arguments("g"), case.cu_seqlens)
