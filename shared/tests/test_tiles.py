"""Tile mathematics that kernels share, on plain arrays."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from chunkwise.shared.kernels import gating, packed, tiles
from chunkwise.shared.testing.compare import GRADIENT_TOLERANCE, STAGE_TOLERANCE, assert_close

THOROUGH = dict(
    test_products_of_packs=lambda C, dtype: (C == 16) != (dtype == jnp.bfloat16),
    # Gates per head are gates per channel that are all alike.
    test_gradients_of_decayed_scores=lambda per_channel: not per_channel,
)


def tile(*shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


def test_indices_and_masks():
    i, j = np.mgrid[:8, :8]
    for got, want in (
        (tiles.row_index(8), i), (tiles.column_index(8), j), (tiles.lower(8), i >= j), (tiles.strictly_lower(8), i > j)
    ):  # fmt: skip
        np.testing.assert_array_equal(got[0], want)


def test_columns_and_rows_are_exact():
    row = tile(2, 1, 64)
    np.testing.assert_array_equal(tiles.to_column(row), row.mT)
    np.testing.assert_array_equal(tiles.to_row(row.mT), row)


def test_heads():
    x = tile(2, 3)
    assert tiles.repeat_heads(x, 2) is x
    np.testing.assert_array_equal(tiles.repeat_heads(x, 6), jnp.repeat(x, 3, axis=0))
    np.testing.assert_array_equal(tiles.sum_groups(tile(5, 6, 2), 3), tile(5, 6, 2).reshape(5, 3, 2, 2).sum(axis=2))


def test_exponentials_are_masked_before_and_after():
    x, mask = jnp.array([[[-1.0, 1e9]]]), jnp.array([[[True, False]]])
    np.testing.assert_allclose(tiles.masked_exp(x, mask), [[[np.exp(-1.0), 0.0]]], rtol=1e-6)
    assert np.isfinite(jax.grad(lambda x: tiles.masked_exp(x, mask).sum())(x)).all()
    G = jnp.cumsum(-jnp.abs(tile(1, 1, 8)), axis=2)
    want = np.tril(np.exp(np.asarray(G[0].T - G[0], np.float64)))
    assert_close("decay", tiles.pair_decay(G.mT, G, tiles.lower(8))[0], want, STAGE_TOLERANCE)


def test_l2norm_and_its_gradient():
    x, dy = 3 * tile(2, 4, 8), tile(2, 4, 8, seed=1)
    exact = np.asarray(x, np.float64)
    want = exact / np.sqrt((exact**2).sum(axis=-1, keepdims=True) + 1e-6)
    assert_close("l2norm", tiles.l2norm(x), want, STAGE_TOLERANCE)
    gradient = jax.vjp(tiles.l2norm, x)[1](dy)[0]
    assert_close("gradient", tiles.l2norm_gradient(x, dy), gradient, STAGE_TOLERANCE)


def gates(per_channel, C=16):
    g = -jnp.abs(tile(4, C, 6, seed=3)) if per_channel else -jnp.abs(tile(4, 1, C, seed=3))
    return jnp.cumsum(g, axis=1 if per_channel else 2)


def scores(q, k, G):
    """Every pair below the diagonal, in float64; G [HV, C, K or 1]."""
    q, k = (np.repeat(np.asarray(x, np.float64), G.shape[0] // x.shape[0], axis=0) for x in (q, k))
    pairs = np.exp(np.minimum(np.asarray(G, np.float64)[:, :, None] - np.asarray(G, np.float64)[:, None], 0.0))
    return np.tril(np.einsum("hic,hijc,hjc->hij", q, np.broadcast_to(pairs, (*pairs.shape[:3], q.shape[2])), k), -1)


@pytest.mark.parametrize("per_channel", [False, True])
def test_decayed_scores(per_channel):
    q, k, g = tile(2, 16, 6), tile(2, 16, 6, seed=1), gates(per_channel)
    assert gating.per_channel(g) == per_channel
    assert gating.suffix(k[None], g[None]) == ("c16_gk" if per_channel else "c16")
    G = g if per_channel else g.mT
    assert_close("decay", gating.decay_from_start(g), np.exp(np.asarray(G, np.float64)), STAGE_TOLERANCE)
    assert_close("scores", gating.decayed_scores(q, k, g), scores(q, k, G), STAGE_TOLERANCE)
    dG = tile(4, 16, 6)
    want = dG if per_channel else dG.sum(axis=2)[:, None]
    np.testing.assert_allclose(gating.gate_gradient(dG, g), want, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("per_channel", [False, True])
def test_gradients_of_decayed_scores(per_channel):
    q, k, g, dP = tile(4, 16, 6), tile(4, 16, 6, seed=1), gates(per_channel), tile(4, 16, 16, seed=2)
    want = jax.vjp(gating.decayed_scores, q, k, g)[1](dP)
    for name, a, b in zip(("dq", "dk", "dG"), gating.decayed_scores_bwd(q, k, g, dP), want, strict=True):
        assert_close(name, a, b, GRADIENT_TOLERANCE["float32"])


def test_sizes_of_packs():
    assert (packed.round_up(9, 8), packed.round_up(8, 8), packed.pad_lanes(1), packed.pad_lanes(129)) == (
        16,
        8,
        128,
        256,
    )
    assert [packed.packing(C, *heads) for C, *heads in ((64, 8), (64, 3), (16, 8, 4), (128, 8))] == [2, 1, 4, 1]
    np.testing.assert_array_equal(packed.block_of(packed.lane_index(8), 4)[0, 0], np.arange(8) // 4)


def test_moving_tiles():
    x = tile(4, 3, 2)
    np.testing.assert_array_equal(packed.concat_lanes([x, x])[:, :, 2:], x)
    np.testing.assert_array_equal(packed.concat_rows([x, x])[:, 3:], x)
    side = packed.side_lanes(x, 2)
    np.testing.assert_array_equal(side[1], jnp.concatenate([x[2], x[3]], axis=1))
    np.testing.assert_array_equal(packed.split_lanes(side, 2), x)
    even, odd = packed.pack_members(x, 2)
    np.testing.assert_array_equal(even, x[::2])
    blocks = packed.place_tiles([even, odd])
    np.testing.assert_array_equal(packed.diagonal_blocks(blocks, 2), x)
    assert blocks.astype(bool).sum() == x.astype(bool).sum()
    assert packed.place_tiles([x]) is x


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_parts(dtype):
    """Two bfloat16 parts hold 16 bits of a computed number; a tensor is exact as it is."""
    x = tile(2, 4, 8)
    found = packed.split_bf16(x, dtype)
    assert len(found) == (2 if dtype == jnp.bfloat16 else 1)
    assert_close("parts", sum(part.astype(jnp.float32) for part in found), x, 2.0**-16)
    assert len(packed.split_computed(x.astype(jnp.bfloat16), dtype)) == 1
    left, right = packed.part_pairs("ab", "xy")
    assert list(zip(left, right, strict=True)) == [("a", "x"), ("a", "y"), ("b", "x")]


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("C", [16, 64])
def test_products_of_packs(C, dtype):
    """At 16 bits where tensors are bfloat16, at float32 accuracy otherwise."""
    heads, p = 4, packed.packing(C, 4)
    A, x = tile(heads, C, C), tile(heads, C, 8, seed=1)
    exact_A, exact_x = np.asarray(A, np.float64), np.asarray(x, np.float64)
    # Rounding of 16 bits in both operands, or of a sum in float32.
    tolerance = 2.0**-15 if dtype == jnp.bfloat16 else STAGE_TOLERANCE
    parts = packed.concat_lanes(packed.split_bf16(packed.side_lanes(A, p), dtype))
    assert_close("A x", packed.multiply_packed(parts, x, p, dtype), exact_A @ exact_x, tolerance)
    got = packed.apply_transposed(packed.side_lanes(A, p), x, dtype, p)
    assert_close("A^T x", got, exact_A.swapaxes(1, 2) @ exact_x, tolerance)
    a = tile(heads, 16, 8, seed=2).astype(dtype)
    got = packed.split_lanes(jax.jit(lambda a, x: packed.outer(a, x, dtype, p))(a, x), p)
    assert_close("a b^T", got, np.asarray(a, np.float64) @ exact_x.swapaxes(1, 2), tolerance)
