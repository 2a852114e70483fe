"""The documentation opens with the call, and states the flops of the one function of cost, which every launch uses."""

from chunkwise.norm_gated import rms_norm_gated
from chunkwise.norm_gated.config import cost
from tests.documents import check_call, documented_flops


def test_documented_flops():
    assert cost(rows=300, D=96).flops == documented_flops(rms_norm_gated, R=300, D=96)


def test_help_opens_with_the_call():
    check_call(rms_norm_gated, B=1, T=8, H=2, D=6)


def test_bytes():
    # x, z and y; then x, z, dy, dx and dz.
    assert cost(rows=10, D=8, itemsize=2).bytes_accessed == 3 * 10 * 8 * 2
    assert cost(rows=10, D=8, itemsize=4, backward=True).bytes_accessed == 5 * 10 * 8 * 4
