"""The tile mathematics by itself, and how the kernels are launched."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from chunkwise.kda import Config, fused_chunk_kda, tile
from chunkwise.shared import LOG2_E
from chunkwise.shared.testing import assert_close, make_inputs, text_for_tpu


def sums_of(g):
    """Return the sums of gates g [1, C, K]."""
    by_row = [jnp.asarray(g[:, r :: tile.SUBLANES], jnp.float32) for r in range(tile.SUBLANES)]
    blocks = [jnp.stack(x, axis=2).reshape(g.shape) for x in tile.block_sums(by_row)]
    return tile.chunk_sums(jnp.asarray(g, jnp.float32), *blocks)


@pytest.mark.parametrize("C", [16, 64])
@pytest.mark.parametrize("strength", [1e-3, 1.0, 30.0])
def test_sums_of_the_gate(C, strength):
    g = -strength * np.random.default_rng(0).random((1, C, 8))
    sums = sums_of(g)
    G = np.cumsum(g, axis=1)
    assert_close("prefix", sums.prefix, G, 1e-6)
    assert_close("suffix", sums.suffix, G[:, -1:] - G, 1e-6)
    for level, sums_of_level in enumerate(sums.levels):
        b = 1 << level
        last_left = (np.arange(C) | (2 * b - 1)) - b
        distance = -np.abs(G - G[:, last_left])
        assert_close(f"level {b}", sums_of_level, distance, 1e-6)


@pytest.mark.parametrize("C", [16, 64])
@pytest.mark.parametrize("base", [1, 4, 16])
def test_interaction(C, base):
    """Every pair and every own product stands in exactly one of the products."""
    rng = np.random.default_rng(0)
    q, k = rng.standard_normal((2, 1, C, 8))
    g = -rng.random((1, C, 8))
    args = (jnp.asarray(x, jnp.float32) for x in (q, k))
    table = jnp.asarray(tile.level_table(C, base))[None]
    levels = sums_of(g * LOG2_E).levels
    turned = tile.interaction_tile(*args, levels, table, base, jnp.float32)
    G = np.cumsum(g, axis=1)
    decay = np.exp(np.tril(np.ones((C, C)))[None, :, :, None] * (G[:, :, None] - G[:, None]))
    expected = [np.tril(np.einsum("hik,hijk,hjk->hij", x, decay, k), last) for x, last in ((q, 0), (k, -1))]
    assert_close("scores", jnp.swapaxes(turned, 1, 2), np.concatenate(expected, axis=1), 1e-6)


@pytest.mark.parametrize("bound", [None, -30.0, -5.0, -1.0, 0.0])
def test_base_block(bound):
    base = tile.base_block(64, bound)
    assert base == {None: 1, -30.0: 2, -5.0: 16, -1.0: 64, 0.0: 64}[bound]


@pytest.mark.interpreted
def test_any_number_of_heads_a_step_gives_the_same():
    x = make_inputs(1, 20, 2, 4, 16, 16, per_channel=True)
    runs = [
        fused_chunk_kda(**x, chunk_size=16, implementation="pallas", config=config)[0]
        for config in (None, Config(1, 1), Config(2, 4))
    ]
    for o in runs[1:]:
        assert_close("o", o, runs[0], 1e-6)


def test_one_launch_a_direction():
    x = make_inputs(1, 32, 1, 1, 128, 128, per_channel=True)
    run = lambda x: fused_chunk_kda(**x, chunk_size=16, implementation="pallas")[0]
    text = text_for_tpu(run, x)
    assert text.count("tpu_custom_call") == 1
    assert "fused_chunk_kda_fwd_c16" in text
    text = text_for_tpu(jax.grad(lambda x: run(x).sum()), x)
    assert text.count("tpu_custom_call") == 2
    assert "fused_chunk_kda_bwd_c16" in text
