"""The documentation states the flops of the one function of cost, which every launch uses."""

import pytest

from chunkwise.kkt import chunk_scaled_dot_kkt
from chunkwise.kkt.cost import cost
from chunkwise.shared.testing.documents import documented_flops


@pytest.mark.parametrize("C", [16, 64, 128])
def test_documented_flops(C):
    sizes = dict(B=2, T=384, H=3, HV=6, K=96, C=C)
    assert cost(**sizes).flops == documented_flops(chunk_scaled_dot_kkt, **sizes)
    per_channel = documented_flops(chunk_scaled_dot_kkt, **sizes | dict(H=6))
    assert cost(**sizes, per_channel=True).flops == per_channel


def test_gradient():
    # The scores of the key heads once more, and two products for every value head.
    sizes = dict(B=2, T=384, H=3, HV=6, K=96, C=64)
    assert cost(**sizes, backward=True).flops == 5 * cost(**sizes).flops
