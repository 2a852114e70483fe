"""The exact inverse of packed unit lower triangular matrices, as tile mathematics.

The matrices of p heads lie side by side in the lanes, [n, C, p * C], so a chunk of 64 fills the 128 lanes of a register
and one product serves p heads. *Diagonal blocks* of b rows are [n, b, p * C]: the lanes
of block t hold the t-th block (of whichever head owns these lanes), the rows are the rows inside the block.

Inside blocks of `SUBSTITUTION` rows, the vector unit eliminates one row after the other: blocks of that height fill one
register or two. From there on block doubling joins two neighbours at a time,

    [X1  0 ]^-1     [ X1^-1                   0    ]
    [M21 X2]     =  [-X2^-1 M21 X1^-1         X2^-1]

with two products of diagonal blocks and a block-diagonal matrix. This is exact, and only those blocks of M that are
needed are multiplied. The products take bfloat16 passes over operands split into parts: six over three parts, which is
float32 accuracy, or four over two, which is enough for a matrix that holds 16 bits itself.
"""

import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from chunkwise.shared.kernels import matmul, packed

# Rows eliminated on the vector unit before the first product.
SUBSTITUTION = 16


def first_block_rows(C: int) -> int:
    """Return the rows of the diagonal blocks of `begin_inverse` for matrices of C rows."""
    return min(SUBSTITUTION, C)


def _rows(x: jax.Array, t: int, b: int) -> jax.Array:
    return x[:, t * b : (t + 1) * b]


def diagonal_blocks(M: jax.Array, b: int) -> jax.Array:
    """Return the diagonal blocks of M [n, C, p C], [n, b, p C]."""
    C, width = M.shape[1:]
    owner = packed.block_of(packed.lane_index(width) & (C - 1), b)
    return functools.reduce(jnp.add, [jnp.where(owner == t, _rows(M, t, b), 0.0) for t in range(C // b)])


def lower_left_blocks(M: jax.Array, b: int) -> jax.Array:
    """Return the lower left b x b block of every 2b block of M, in the lanes of its columns; other lanes zero."""
    C, width = M.shape[1:]
    owner = packed.block_of(packed.lane_index(width) & (C - 1), b)
    rows = [jnp.where(owner == 2 * t, _rows(M, 2 * t + 1, b), 0.0) for t in range(C // (2 * b))]
    return functools.reduce(jnp.add, rows)


def substitute(M: jax.Array) -> jax.Array:
    """Return the inverses of I + the strictly lower part of blocks M [n, b, width], row by row."""
    n, b, width = M.shape
    lane = lax.broadcasted_iota(jnp.int32, (n, b, width), 2) & (b - 1)  # the column inside the block
    row = lax.broadcasted_iota(jnp.int32, (n, b, width), 1)
    X = jnp.where(lane == row, jnp.float32(1.0), jnp.float32(0.0))
    M = jnp.where(lane < row, M, 0.0)
    for j in range(b - 1):
        first = j // 8 * 8  # rows above are finished
        rest = X[:, first:] - broadcast_lane(M[:, first:], j, b) * X[:, j : j + 1]
        X = jnp.concatenate([X[:, :first], rest], axis=1) if first else rest
    return X


def broadcast_lane(x: jax.Array, j: int, b: int) -> jax.Array:
    """Return x with lane j of every block of b lanes copied to the whole block."""
    n, m, width = x.shape
    index = lax.broadcasted_iota(jnp.int32, (n * m, width), 1)
    index = (index & -b) + j
    return jnp.take_along_axis(x.reshape(n * m, width), index, axis=1).reshape(x.shape)


def spread(x: jax.Array, b: int) -> jax.Array:
    """Return diagonal blocks [n, b, width] as block-diagonal matrices [n, width, width]."""
    owner = packed.block_of(packed.lane_index(x.shape[2]), b)
    return jnp.concatenate([jnp.where(owner == t, x, jnp.zeros_like(x)) for t in range(x.shape[2] // b)], axis=1)


def multiply_blocks(a: jax.Array, b: jax.Array, count: int) -> jax.Array:
    """Return the products of diagonal blocks a with diagonal blocks b, float32, from `count` bfloat16 parts of each."""
    return matmul.dot_parts(
        matmul.bf16_parts(a, count), tuple(spread(part, a.shape[1]) for part in matmul.bf16_parts(b, count))
    )


def begin_inverse(M: jax.Array) -> jax.Array:
    """Return the inverses of the diagonal blocks of I + M, row by row, which `block_doubling` starts from."""
    return substitute(diagonal_blocks(M, first_block_rows(M.shape[1])))


def block_doubling(X: jax.Array, M: jax.Array, count: int = 3) -> Iterator[Any]:
    """Join neighbouring inverse blocks until one is left; a generator, because every product waits for the one before.

    A step needs only every second block of M, so two matrices share a product: the blocks of one of them are moved by
    one place.

    Args:
      X: [n, b, width] of `begin_inverse`.
      M: packed matrices [n, C, width] float32.
      count: bfloat16 parts of the operands of the products, 8 bits each.

    Yields:
      None between two products that wait for one another, where other products should run to keep the matrix unit busy.
      The last value is the inverse [n, C, width].
    """
    n, b, width = X.shape
    if n % 2:  # an odd one is paired with itself
        X, M = jnp.concatenate([X, X[-1:]]), jnp.concatenate([M, M[-1:]])
    half = X.shape[0] // 2
    while b < M.shape[1]:
        even = (packed.block_of(packed.lane_index(width), b) & 1) == 0  # [1, 1, width]
        S = lower_left_blocks(M, b)  # [n, b, width]
        X_a, X_b, S_a, S_b = X[:half], X[half:], S[:half], S[half:]
        # Even blocks of lanes serve the first matrix of a pair, odd ones the second.
        left = jnp.where(even, X_a, packed.rotate(X_b, b))  # [n / 2, b, width]
        right = jnp.where(even, packed.rotate(X_a, -b), X_b)
        T = multiply_blocks(jnp.where(even, S_a, packed.rotate(S_b, b)), left, count)
        yield
        corner = multiply_blocks(right, T, count)
        yield
        corner = jnp.concatenate([corner, packed.rotate(corner, -b)])
        X = jnp.concatenate([jnp.where(even, X, 0.0), jnp.where(even, -corner, X)], axis=1)
        b *= 2
    yield X[:n]


def unit_lower_inverse(M: jax.Array, count: int = 3) -> jax.Array:
    """Return (I + M)^-1 of packed matrices [n, C, p C] float32; only entries below the diagonal are read.

    The products take operands of `count` bfloat16 parts, 8 bits each.
    """
    *_, X = block_doubling(begin_inverse(M), M, count)
    return X
