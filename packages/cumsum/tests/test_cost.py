"""The documentation states the flops of the one function of cost, which every launch uses."""

import pytest

from chunkwise.cumsum import chunk_local_cumsum
from chunkwise.cumsum.cost import cost
from chunkwise.shared.testing.documents import documented_flops


@pytest.mark.parametrize("C", [16, 64, 128])
def test_documented_flops(C):
    for K in (1, 96):
        sizes = dict(B=2, T=384, H=3, K=K, C=C)
        assert cost(**sizes).flops == documented_flops(chunk_local_cumsum, **sizes)


def test_bytes():
    # A gate of two bytes is read and four bytes are written.
    assert cost(B=2, T=128, H=3, C=64, itemsize=2).bytes_accessed == 6 * 2 * 128 * 3
