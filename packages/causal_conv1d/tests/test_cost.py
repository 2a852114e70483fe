"""The documentation opens with the call, and states the flops of the one function of cost, which every launch uses."""

import pytest

from chunkwise.causal_conv1d import causal_conv1d, causal_conv1d_update
from chunkwise.causal_conv1d.config import cost
from tests.documents import check_call, documented_flops

SIZES = dict(B=2, T=300, D=96, W=4)


@pytest.mark.parametrize("function", [causal_conv1d, causal_conv1d_update])
def test_documented_flops(function):
    assert cost(**SIZES).flops == documented_flops(function, **SIZES)


@pytest.mark.parametrize("function", [causal_conv1d, causal_conv1d_update])
def test_help_opens_with_the_call(function):
    check_call(function, B=1, T=8, D=6, W=4, N=1)


def test_bytes():
    # x and y; then x, dy and dx.
    assert cost(**SIZES).bytes_accessed == 2 * 2 * 300 * 96 * 2
    assert cost(**SIZES, itemsize=4, backward=True).bytes_accessed == 3 * 2 * 300 * 96 * 4
