"""Helpers of kernels: what no test of a kernel shows, because its tolerances are wider or its results are the same."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from chunkwise.shared.kernels import chunking, inverse, launcher, packed, tiles
from chunkwise.shared.kernels.spans import layout
from chunkwise.shared.testing.compare import STAGE_TOLERANCE, TOLERANCE, assert_close
from chunkwise.shared.testing.inputs import boundaries


def tile(*shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


def test_l2norm_and_its_gradient():
    x, dy = 3 * tile(2, 4, 8), tile(2, 4, 8, seed=1)
    exact = np.asarray(x, np.float64)
    want = exact / np.sqrt((exact**2).sum(axis=-1, keepdims=True) + 1e-6)
    assert_close("l2norm", tiles.l2norm(x), want, STAGE_TOLERANCE)
    gradient = jax.vjp(tiles.l2norm, x)[1](dy)[0]
    assert_close("gradient", tiles.l2norm_gradient(x, dy), gradient, STAGE_TOLERANCE)


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


def test_an_inverse_waits_between_its_products():
    """Two parts hold 16 bits: 2^-16 an operand, in a few products one after the other."""
    M = tile(2, 64, 64) / 10
    want = np.linalg.inv(np.eye(64) + np.tril(np.asarray(M, np.float64), -1))
    side, waits = packed.side_lanes(M, 2), []

    def invert(M, parts):
        *between, X = inverse.block_doubling(inverse.begin_inverse(M), M, parts)
        waits.extend(between)
        return X

    for parts, limit in ((3, TOLERANCE["float32"]), (2, 2.0**-13)):
        X = jax.jit(invert, static_argnums=1)(side, parts)
        assert_close("inverse", packed.split_lanes(X, 2), want, limit)
    # Two products for 16 to 32 rows, two for 32 to 64.
    assert waits == [None] * 8


def test_scales():
    assert launcher.split_scale(2) == (2.0, None)
    inside, after = launcher.split_scale(jnp.float32(2.0))
    assert (inside, after) == (1.0, 2.0)
    o = jnp.ones((2,), jnp.bfloat16)
    assert launcher.scaled(o, None) is o
    assert launcher.scaled(o, after).dtype == jnp.bfloat16
    np.testing.assert_array_equal(launcher.scaled(o, after), 2 * o)


def test_values_taken_and_put():
    """Places that do not exist give zeros, and are dropped."""
    values, index = jnp.array([5, 6, 7, 8], jnp.int32), jnp.array([2, -1, 0, 4], jnp.int32)
    np.testing.assert_array_equal(chunking.take(values, index), [7, 0, 5, 0])
    np.testing.assert_array_equal(chunking.put(values, index, jnp.array([1, 2, 3, 4], jnp.int32)), [3, 6, 1, 8])


@pytest.mark.parametrize("lengths", [None, (5, 0, 12)])
def test_numbers_of_chunks_have_32_bits(lengths):
    """Whatever the modes of JAX: kernels read them from scalar memory."""
    with jax.enable_x64(True), jax.numpy_dtype_promotion("strict"):
        chunks = chunking.Chunking(1, 20, 16, None if lengths is None else boundaries(*lengths))
        assert {getattr(chunks, name).dtype for name in ("sequence", "length", "final_chunk")} == {jnp.dtype("int32")}


def test_states_of_empty_sequences():
    states, start, cu_seqlens = tile(3, 2), 2.0 + tile(3, 2), boundaries(4, 0, 1)
    assert layout.unless_empty(states, start, None) is states
    np.testing.assert_array_equal(layout.unless_empty(states, start, cu_seqlens)[1], start[1])
    np.testing.assert_array_equal(layout.unless_empty(states, start, cu_seqlens)[::2], states[::2])
    assert not layout.unless_empty(states, None, cu_seqlens)[1].any()
