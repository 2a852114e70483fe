"""The exact inverse of packed unit lower triangular matrices, as tile mathematics.

The matrices of p heads lie side by side in the lanes, [n, C, p * C], so a chunk of 64 fills the 128 lanes of a register
and one product serves p heads. Lanes are never moved. A *strip* of block size b is [n, b, p * C]: the lanes of block t
hold the t-th diagonal block (of whichever head owns these lanes), the rows are the rows inside the block.

Rows are eliminated one at a time inside blocks of `SUBSTITUTION` rows, on the vector unit, where a strip is a single
register or two. From there on the ladder joins two neighbours at a time,

    [X1  0 ]^-1     [ X1^-1                   0    ]
    [M21 X2]     =  [-X2^-1 M21 X1^-1         X2^-1]

with two products of a strip and a block-diagonal matrix: exact, and no more of M is multiplied than the blocks in use.
"""

import jax
import jax.numpy as jnp
from chunkwise.shared import bf16_parts, dot_parts
from jax import lax

# Rows eliminated on the vector unit before the first product.
SUBSTITUTION = 16


def lane_index(size: int) -> jax.Array:
    """Return the lane of shape [1, 1, size]."""
    return lax.broadcasted_iota(jnp.int32, (1, 1, size), 2)


def block_of(index: jax.Array, b: int) -> jax.Array:
    """Return index // b for a power of two b."""
    return lax.shift_right_logical(index, b.bit_length() - 1)


def _rows(x: jax.Array, t: int, b: int) -> jax.Array:
    return x[:, t * b : (t + 1) * b]


def diagonal_strip(M: jax.Array, b: int) -> jax.Array:
    """Return the diagonal blocks of M [n, C, p C] as a strip [n, b, p C]."""
    C, width = M.shape[1:]
    owner = block_of(lane_index(width) & (C - 1), b)
    return sum(jnp.where(owner == t, _rows(M, t, b), 0.0) for t in range(C // b))


def lower_left_strip(M: jax.Array, b: int) -> jax.Array:
    """Return the lower left b x b block of every 2b block of M, in the lanes of its columns; other lanes zero."""
    C, width = M.shape[1:]
    owner = block_of(lane_index(width) & (C - 1), b)
    return sum(jnp.where(owner == 2 * t, _rows(M, 2 * t + 1, b), 0.0) for t in range(C // (2 * b)))


def substitute(M: jax.Array) -> jax.Array:
    """Return the inverse strip of I + the strictly lower part of a strip M [n, b, width], row by row."""
    n, b, width = M.shape
    lane = lax.broadcasted_iota(jnp.int32, (n, b, width), 2) & (b - 1)
    row = lax.broadcasted_iota(jnp.int32, (n, b, width), 1)
    X = jnp.where(lane == row, 1.0, 0.0)
    M = jnp.where(lane < row, M, 0.0)
    for j in range(b - 1):
        first = j // 8 * 8  # rows above are finished
        column = broadcastlane_index(M[:, first:], j, b)
        done = X[:, :first]
        X = X[:, first:] - column * X[:, j : j + 1]
        X = jnp.concatenate([done, X], axis=1) if first else X
    return X


def broadcastlane_index(x: jax.Array, j: int, b: int) -> jax.Array:
    """Return x with lane j of every block of b lanes copied to the whole block."""
    width = x.shape[-1]
    index = lax.broadcasted_iota(jnp.int32, x.shape, 2)
    index = (index & (width - b)) + j if b < width else jnp.full_like(index, j)
    return jnp.take_along_axis(x, index, axis=2)


def spread(parts, b: int, offset: int):
    """Place a strip [n, b, width] as [n, width, width]: rows of block t + offset, lanes of block t."""
    width = parts[0].shape[-1]
    owner = block_of(lane_index(width), b)

    def place(x):
        rows = [jnp.where(owner == t - offset, x, jnp.zeros_like(x)) for t in range(width // b)]
        return jnp.concatenate(rows, axis=1)

    return tuple(place(x) for x in parts)


def place(x: jax.Array, p: int) -> jax.Array:
    """Return packed matrices [n, C, w] block-diagonally in p groups of lanes, [n, p C, w]."""
    if p == 1:
        return x
    owner = block_of(lane_index(x.shape[2]), x.shape[2] // p)
    return jnp.concatenate([jnp.where(owner == i, x, jnp.zeros_like(x)) for i in range(p)], axis=1)


def unit_lower_inverse(M: jax.Array) -> jax.Array:
    """Return (I + M)^-1 of packed matrices [n, C, p C] float32; only what is below the diagonal is read."""
    C, width = M.shape[1:]
    b = min(SUBSTITUTION, C)
    X = substitute(diagonal_strip(M, b))
    while b < C:
        even = (block_of(lane_index(width), b) & 1) == 0
        left = jnp.where(even, X, 0.0)
        parts = bf16_parts(X)
        T = dot_parts(bf16_parts(lower_left_strip(M, b)), spread(parts, b, 0))
        X21 = dot_parts(parts, spread(bf16_parts(T), b, 1))
        X = jnp.concatenate([left, jnp.where(even, -X21, X)], axis=1)
        b *= 2
    return X
