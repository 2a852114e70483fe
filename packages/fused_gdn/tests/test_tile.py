"""Tile mathematics on plain arrays."""

import jax.numpy as jnp
import numpy as np

from chunkwise.fused_gdn.operator import to_blocks
from chunkwise.fused_gdn.tile import split_gate
from chunkwise.shared.testing.inputs import make_inputs


def test_split_gate_is_exact():
    rng = np.random.default_rng(0)
    g = jnp.asarray(-np.exp(rng.uniform(-20, 7, 4096)), jnp.float32)
    coarse, fine = split_gate(g)
    np.testing.assert_array_equal(np.asarray(coarse, np.float64) + np.asarray(fine, np.float64), g)
    np.testing.assert_array_equal(np.asarray(coarse) % 0.0625, 0.0)
    assert np.abs(fine).max() <= 1 / 32


def test_split_gate_keeps_differences_of_large_sums():
    g = make_inputs(T=128, gate="spikes")["g"][0, :, 0]
    coarse, fine = (jnp.cumsum(part) for part in split_gate(g))
    exact = np.cumsum(np.asarray(g, np.float64))
    kept = (coarse[1:] - coarse[:-1]) + (fine[1:] - fine[:-1])
    plain = jnp.cumsum(g)[1:] - jnp.cumsum(g)[:-1]
    # Against the tokens' own gates: the plain difference inherits the rounding of both sums.
    assert np.abs(kept - np.diff(exact)).max() < 1e-6
    assert np.abs(plain - np.diff(exact)).max() > 1e-5


def test_values_per_token_in_blocks_of_heads():
    x = jnp.arange(2 * 7 * 6, dtype=jnp.float32).reshape(2, 7, 6)
    blocks = to_blocks(x, 3, 8)
    assert blocks.shape == (2, 2, 8, 3)
    np.testing.assert_array_equal(blocks[1, 1, 4], x[1, 4, 3:])
    assert not blocks[:, :, 7].any()
