"""The tile size of kernels that are cut by heads alone."""

from chunkwise.shared.kernels.config import HeadConfig, choose_heads


def test_choose_heads():
    assert choose_heads(4, 8, 1, most=8) == HeadConfig(heads=8)
    assert choose_heads(4, 8, 1, most=8, per_channel=True) == HeadConfig(heads=2)
    # Whole groups of value heads that share a key head, or a part of one group.
    assert choose_heads(2, 12, 1, most=8) == HeadConfig(heads=6)
