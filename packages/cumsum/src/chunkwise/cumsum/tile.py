"""G_i = sum of g over the first i + 1 rows of a chunk; arrays in, arrays out."""

import jax.numpy as jnp

from chunkwise.shared.kernels import matmul, tiles


def cumsum_tile(g, reverse: bool):
    """Return the inclusive cumulative sum of g [n, C, D] over its rows, if `reverse` from the last row up.

    It is a product with a triangle of ones: products with 1 are exact, and every sum is made from gates, not from sums.
    """
    C = g.shape[1]
    i, j = tiles.row_index(C), tiles.column_index(C)
    ones = jnp.where(i <= j if reverse else i >= j, jnp.float32(1.0), jnp.float32(0.0))  # [1, C, C]
    return matmul.dot(jnp.broadcast_to(ones, (g.shape[0], C, C)), g)
