"""The inverse of unit lower triangular matrices, packed in the lanes and in plain JAX."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from chunkwise.shared.kernels import inverse, packed
from chunkwise.shared.kernels.inverse import begin_inverse, block_doubling, first_block_rows, unit_lower_inverse
from chunkwise.shared.plain.block_inverse import block_inverse, known_inverse
from chunkwise.shared.testing.compare import GRADIENT_TOLERANCE, TOLERANCE, assert_close


def matrices(heads, C, size=0.3):
    x = np.random.default_rng(C).standard_normal((heads, C, C)) * size
    return jnp.asarray(x, jnp.float32), np.linalg.inv(np.eye(C) + np.tril(np.asarray(jnp.float32(x), np.float64), -1))


@pytest.mark.parametrize(("heads", "C"), [(2, 16), (3, 32), (1, 128)])
def test_packed(heads, C):
    """All chunk sizes, an odd number of packs too; what lies on and above the diagonal is not read."""
    M, want = matrices(heads, C, 0.1)
    p = packed.packing(C, heads)
    got = jax.jit(unit_lower_inverse)(packed.side_lanes(M, p))
    assert_close("inverse", packed.split_lanes(got, p), want, TOLERANCE["float32"])


def test_two_parts_hold_16_bits():
    M, want = matrices(2, 64, 0.1)
    M = packed.side_lanes(M, 2)
    got = jax.jit(lambda M: unit_lower_inverse(M, 2))(M)
    # 2^-16 an operand, in a few products one after the other.
    assert_close("inverse", packed.split_lanes(got, 2), want, 2.0**-13)


def test_the_ladder_waits_between_its_products():
    M, want = matrices(2, 64, 0.1)
    M = packed.side_lanes(M, 2)
    start = begin_inverse(M)
    assert start.shape == (1, first_block_rows(64), 128)
    waits = []

    def climb(X, M):
        *between, X = block_doubling(X, M)
        waits.extend(between)
        return X

    X = jax.jit(climb)(start, M)
    # Two products for 16 to 32 rows, two for 32 to 64.
    assert waits == [None] * 4
    assert_close("inverse", packed.split_lanes(X, 2), want, TOLERANCE["float32"])


def test_strips():
    M = matrices(2, 32)[0]
    side = packed.side_lanes(M, 2)
    blocks = inverse.diagonal_blocks(side, 16)
    np.testing.assert_array_equal(blocks[0, :, 48:], M[1, 16:, 16:])
    corner = inverse.lower_left_blocks(side, 16)
    np.testing.assert_array_equal(corner[0, :, 32:48], M[1, 16:, :16])
    assert not corner[0, :, 16:32].any()
    solved = inverse.substitute(blocks)
    want = np.linalg.inv(np.eye(16) + np.tril(np.asarray(M[1, 16:, 16:], np.float64), -1))
    assert_close("substitution", solved[0, :, 48:], want, TOLERANCE["float32"])
    copied = inverse.broadcast_lane(blocks, 3, 16)
    np.testing.assert_array_equal(copied[0, :, 16:32], jnp.repeat(blocks[0, :, 19:20], 16, axis=1))
    np.testing.assert_array_equal(inverse.spread(blocks, 16)[0, 16:32, 16:32], blocks[0, :, 16:32])
    product = inverse.multiply_blocks(blocks, blocks, 3)
    block = np.asarray(blocks[0, :, 16:32], np.float64)
    assert_close("product", product[0, :, 16:32], block @ block, TOLERANCE["float32"])


@pytest.mark.parametrize("C", [16, 32])
def test_plain(C):
    """At the size that rows are eliminated one by one, and at one that is halved first."""
    A, want = matrices(3, C, 0.1)
    assert_close("inverse", jax.jit(block_inverse)(A), want, TOLERANCE["float32"])


@pytest.mark.parametrize("known", [False, True])
def test_gradient_of_the_plain_inverse(known):
    A, X = matrices(2, 16, 0.1)
    dX = np.random.default_rng(1).standard_normal(X.shape)
    invert = known_inverse if known else lambda A, _: block_inverse(A)
    got, none = jax.jit(jax.grad(lambda A, X: jnp.sum(invert(A, X) * dX), (0, 1)))(A, jnp.float32(X))
    want = -np.tril(X.mT @ dX @ X.mT, -1)
    assert_close("dA", got, want, GRADIENT_TOLERANCE["float32"])
    assert not none.any()
