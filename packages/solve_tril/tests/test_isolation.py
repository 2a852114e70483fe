"""What is not finite in one sequence leaves every bit of the others, and padding may hold anything."""

import pytest

from chunkwise.shared.testing.cases import ISOLATION_CASES
from chunkwise.shared.testing.poison import assert_isolated
from chunkwise.solve_tril import solve_tril


@pytest.mark.parametrize("implementation", ["xla", "pallas"])
@pytest.mark.parametrize("case", ISOLATION_CASES, ids=str)
def test_isolated(case, implementation):
    def run(x, cu_seqlens):
        return dict(A_inv=solve_tril(x["A"], cu_seqlens, implementation=implementation))

    # The first row of A has nothing below the diagonal, so NaN in it is not read.
    assert_isolated(run, case.finite_arguments("A"), case.cu_seqlens, visible=False)
