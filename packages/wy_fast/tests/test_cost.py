"""The documentation states the flops of the one function of cost, which every launch uses."""

import pytest

from chunkwise.shared.testing.documents import documented_flops
from chunkwise.wy_fast import recompute_w_u
from chunkwise.wy_fast.cost import cost


@pytest.mark.parametrize("C", [16, 64, 128])
def test_documented_flops(C):
    sizes = dict(B=2, T=384, H=3, HV=6, K=96, V=80, C=C)
    assert cost(**sizes).flops == documented_flops(recompute_w_u, **sizes)
    assert cost(**sizes, backward=True).flops == 2 * cost(**sizes).flops
