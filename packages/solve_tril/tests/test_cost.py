"""The documentation states the flops of the one function of cost, which every launch uses."""

import pytest

from chunkwise.shared.testing.documents import documented_flops
from chunkwise.solve_tril import solve_tril
from chunkwise.solve_tril.cost import cost


@pytest.mark.parametrize("C", [16, 64, 128])
def test_documented_flops(C):
    sizes = dict(B=2, T=384, HV=6, C=C)
    assert cost(**sizes).flops == documented_flops(solve_tril, **sizes)


@pytest.mark.parametrize("C", [16, 64, 128])
def test_flops_are_those_of_the_algorithm(C):
    # Substitution inside of blocks of 16 rows, then two products for every pair of neighbours.
    joins = [b for b in (16, 32, 64) if b < C]
    matrix = C // 16 * 16**3 // 3 + sum(2 * 2 * b**3 * (C // (2 * b)) for b in joins)
    assert cost(B=1, T=C, HV=1, C=C).flops == pytest.approx(matrix, abs=16)
    assert cost(B=1, T=C, HV=1, C=C, backward=True).flops == 4 * C**3
