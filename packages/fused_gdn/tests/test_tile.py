"""Tile mathematics on plain arrays, and what launches and benchmarks count."""

import jax.numpy as jnp
import numpy as np

from chunkwise.fused_gdn.config import cost, states_cost
from chunkwise.fused_gdn.tile import Heads, gate_sums, split_gate
from chunkwise.shared.kernels.spans import layout
from chunkwise.shared.testing.inputs import make_inputs


def test_split_gate_is_exact():
    rng = np.random.default_rng(0)
    g = jnp.asarray(-np.exp(rng.uniform(-20, 7, 4096)), jnp.float32)
    coarse, fine = split_gate(g)
    np.testing.assert_array_equal(np.asarray(coarse, np.float64) + np.asarray(fine, np.float64), g)
    np.testing.assert_array_equal(np.asarray(coarse) % 0.0625, 0.0)
    assert np.abs(fine).max() <= 1 / 32


def test_no_sum_of_gates_reaches_another_sequence():
    """Six tokens of a sequence are before ten of another: their gates change no bit of its sums."""
    heads = Heads(C=16, K=128, V=128, heads=2, group=1, p=2)
    owner = jnp.asarray([[3] * 6 + [4] * 10] * 2, jnp.int32).reshape(1, 32)
    masks = layout.sequence_masks(owner, 16, jnp.int32(3), jnp.int32(4))
    g = make_inputs(T=16, HV=2, gate="spikes")["g"][0]
    sums = [gate_sums(x, jnp.ones_like(g), heads, True, masks) for x in (g, g.at[:6].set(0.0))]
    columns, rows = zip(*((x.G, x.G_rows) for x in sums), strict=True)
    for one, other in zip(*columns, strict=True):
        np.testing.assert_array_equal(one[6:], other[6:])
    for one, other in zip(*rows, strict=True):
        np.testing.assert_array_equal(one.reshape(2, 2, 16)[..., 6:], other.reshape(2, 2, 16)[..., 6:])
    assert jnp.any(columns[0][0][:6] != 0.0)


SIZES = dict(B=2, T=300, H=2, HV=6, K=128, V=256)


def test_chunked():
    """Products with whole states cost K V, those inside a chunk C K or C V, each for a token and value head."""
    flops = cost(**SIZES, C=64).flops
    assert cost(**SIZES, C=64, backward=True).flops == 2 * flops
    assert states_cost(**SIZES, C=64).flops < flops


def test_bytes_are_those_of_the_arrays():
    tokens, gates = 2 * 2 * (2 * 2 * 128 + 2 * 6 * 256), 2 * 2 * 4 * 6
    assert cost(**SIZES, C=64).bytes_accessed == 300 * (tokens + gates)
