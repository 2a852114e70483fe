"""What launches and benchmarks count; the pipeline compares it with the docstrings."""

from chunkwise.fused_gdn.config import cost, states_cost

SIZES = dict(B=2, T=300, H=2, HV=6, K=128, V=256)


def test_chunked():
    """Products with whole states cost K V, those inside a chunk C K or C V, each for a token and value head."""
    flops = cost(**SIZES, C=64).flops
    assert cost(**SIZES, C=64, backward=True).flops == 2 * flops
    assert states_cost(**SIZES, C=64).flops < flops


def test_bytes_are_those_of_the_arrays():
    tokens, gates = 2 * 2 * (2 * 2 * 128 + 2 * 6 * 256), 2 * 2 * 4 * 6
    assert cost(**SIZES, C=64).bytes_accessed == 300 * (tokens + gates)
