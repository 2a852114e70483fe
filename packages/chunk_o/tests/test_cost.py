"""The documentation states the flops of the one function of cost, which every launch uses."""

import pytest

from chunkwise.chunk_o import chunk_fwd_o
from chunkwise.chunk_o.cost import cost
from chunkwise.shared.testing.documents import documented_flops


@pytest.mark.parametrize("C", [16, 64, 128])
def test_documented_flops(C):
    sizes = dict(B=2, T=384, H=3, HV=6, K=96, V=80, C=C)
    assert cost(**sizes).flops == documented_flops(chunk_fwd_o, **sizes)
    assert cost(**sizes, per_channel=True).flops == documented_flops(chunk_fwd_o, **sizes | dict(H=6))


def test_gradient():
    sizes = dict(B=2, T=384, H=6, HV=6, K=96, V=80, C=64)
    # The scores, and the gradients of both operands of three products.
    assert cost(**sizes, backward=True).flops == 2 * cost(**sizes).flops + 2 * 2 * 384 * 6 * 64 * 96
