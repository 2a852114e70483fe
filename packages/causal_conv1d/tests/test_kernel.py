"""The tables of blocks."""

from chunkwise.causal_conv1d import Config
from chunkwise.causal_conv1d.kernel import ConvStatic, tables
from chunkwise.causal_conv1d.sequences import find
from chunkwise.shared.testing.inputs import boundaries

SMALL = Config(16, 128)


def test_only_blocks_with_an_end_are_mixed():
    static = ConvStatic(96, 4, None, SMALL)
    # Sequences of 20, 50 and 26 tokens: boundaries at 0, 20, 70 and 96, in blocks 0, 1, 4 and 5 of 16.
    blocks, sequences, _ = tables(find(1, 96, boundaries(20, 50, 26), None), 1, False, static)
    assert blocks[0].tolist() == [1, 1, 0, 0, 1, 1]
    assert sequences is None


def test_whole_blocks_need_no_tables():
    assert tables(find(2, 64, None, None), 2, False, ConvStatic(64, 4, None, SMALL)) == (None, None, None)
