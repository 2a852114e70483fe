"""The docstrings, the launches and the benchmarks count the same flops."""

from chunkwise.fused_gdn import chunk_gated_delta_rule, recurrent_gated_delta_rule
from chunkwise.fused_gdn.cost import cost, states_cost
from chunkwise.shared.serving.decode import launch
from tests.documents import documented_flops

SIZES = dict(B=2, T=300, H=2, HV=6, K=128, V=256)


def test_chunked():
    """Products with whole states cost K V, those inside a chunk C K or C V, each for a token and value head."""
    flops = cost(**SIZES, C=64).flops
    assert flops == documented_flops(chunk_gated_delta_rule, **SIZES, C=64)
    assert cost(**SIZES, C=64, backward=True).flops == 2 * flops
    assert states_cost(**SIZES, C=64).flops < flops


def test_bytes_are_those_of_the_arrays():
    tokens, gates = 2 * 2 * (2 * 2 * 128 + 2 * 6 * 256), 2 * 2 * 4 * 6
    assert cost(**SIZES, C=64).bytes_accessed == 300 * (tokens + gates)


def test_decode():
    assert launch.flops(2 * 300, 6, 128, 256) == documented_flops(recurrent_gated_delta_rule, **SIZES)
