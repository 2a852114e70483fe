"""The tile mathematics by itself, and how the kernels are launched."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from chunkwise.kda import Config, fused_chunk_kda, tile
from chunkwise.shared.testing import assert_close, make_inputs, text_for_tpu


@pytest.mark.parametrize("C", [16, 64])
@pytest.mark.parametrize("strength", [1e-3, 1.0, 30.0])
def test_sums_of_the_gate(C, strength):
    g = -strength * np.random.default_rng(0).random((1, C, 8))
    sums = tile.widen(jnp.asarray(g, jnp.float32), jnp.zeros((1, C, 8)), [], 1)
    G = np.cumsum(g, axis=1)
    assert_close("prefix", sums.prefix, G, 1e-6)
    assert_close("suffix", sums.suffix, G[:, -1:] - G, 1e-6)
    for level, sums_of_level in enumerate(sums.levels):
        b = 1 << level
        last_left = (np.arange(C) | (2 * b - 1)) - b
        distance = -np.abs(G - G[:, last_left])
        assert_close(f"level {b}", sums_of_level, distance, 1e-6)


@pytest.mark.parametrize("C", [16, 32, 64])
def test_level_matrix(C):
    g = np.random.default_rng(0).random((C, 4))
    sums = tile.widen(jnp.asarray(g[None], jnp.float32), jnp.zeros((1, C, 4)), [], 1)
    two, four, prefix, suffix = np.split(tile.level_matrix(C) @ g, 4)
    assert_close("level 2", sums.levels[1][0], two, 1e-6)
    assert_close("level 4", sums.levels[2][0], four, 1e-6)
    wide = tile.widen(jnp.asarray(prefix[None]), jnp.asarray(suffix[None]), list(sums.levels[:3]), tile.SUBLANES)
    for got, want in zip(jax.tree.leaves(wide), jax.tree.leaves(sums), strict=True):
        assert_close("sums", got, want, 1e-6)


@pytest.mark.parametrize("C", [16, 32, 64, 128])
@pytest.mark.parametrize("repeated", [False, True])
def test_inverse(C, repeated):
    M = np.tril(np.full((2, C, C), 1.0) if repeated else np.random.default_rng(0).standard_normal((2, C, C)) / 8, -1)
    assert_close("inverse", tile.inverse_tile(jnp.asarray(M, jnp.float32)), np.linalg.inv(np.eye(C) + M), 2e-6)


def test_split_holds_all_bits():
    x = jnp.asarray(np.random.default_rng(0).standard_normal((64, 64)), jnp.float32)
    high, low = jax.jit(tile.split2)(x)
    assert_close("two", high.astype(jnp.float32) + low.astype(jnp.float32), x, 2e-5)
    np.testing.assert_array_equal(sum(y.astype(jnp.float32) for y in jax.jit(tile.split3)(x)), x)


@pytest.mark.parametrize("bound", [None, -30.0, -5.0, -1.0, 0.0])
def test_base_block(bound):
    base = tile.base_block(64, bound)
    assert base == {None: 1, -30.0: 2, -5.0: 16, -1.0: 64, 0.0: 64}[bound]


@pytest.mark.interpreted
def test_any_number_of_heads_a_step_gives_the_same():
    x = make_inputs(1, 20, 2, 4, 16, 16, per_channel=True)
    runs = [
        fused_chunk_kda(**x, chunk_size=16, implementation="pallas", config=config)[0]
        for config in (None, Config(1, 1), Config(2, 2))
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
