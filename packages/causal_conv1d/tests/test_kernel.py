"""The tables of blocks, and what the documentation says of the calls and their cost."""

import pytest

from chunkwise.causal_conv1d import Config, causal_conv1d, causal_conv1d_update
from chunkwise.causal_conv1d.config import cost
from chunkwise.causal_conv1d.kernel import ConvStatic, tables
from chunkwise.shared.kernels.spans.row_sequences import find
from chunkwise.shared.testing.inputs import boundaries
from tests.documents import check_call, documented_flops

SMALL = Config(16, 128)


def test_only_blocks_with_an_end_are_mixed():
    static = ConvStatic(96, 4, None, SMALL)
    # Sequences of 20, 50 and 26 tokens: boundaries at 0, 20, 70 and 96, in blocks 0, 1, 4 and 5 of 16.
    blocks, sequences, _ = tables(find(1, 96, boundaries(20, 50, 26), None), 1, False, static)
    assert blocks[0].tolist() == [1, 1, 0, 0, 1, 1]
    assert sequences is None


def test_whole_blocks_need_no_tables():
    assert tables(find(2, 64, None, None), 2, False, ConvStatic(64, 4, None, SMALL)) == (None, None, None)


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
