"""(I + A)^-1 of strictly lower A, and its gradient; arrays in, arrays out."""

import jax.numpy as jnp

from chunkwise.shared.kernels import inverse, matmul, packed, tiles


def solve_tile(A):
    """Return (I + A)^-1 for A [n, C, C]; entries of A on and above the diagonal are not read.

    Rows of 16 x 16 blocks are eliminated one by one, then neighbouring blocks are joined by products, which is exact
    substitution (see `chunkwise.shared.kernels.inverse`). A sum of powers of A is the inverse, too, but in floating
    point the powers cancel catastrophically when keys repeat.
    """
    # Several matrices side by side fill the lanes of a register.
    p = packed.packing(A.shape[1], A.shape[0])
    return packed.split_lanes(inverse.unit_lower_inverse(packed.side_lanes(A, p)), p)


def solve_bwd_tile(X, dX):
    """Return dA = -X^T dX X^T below the diagonal [n, C, C], from the inverse X and its cotangent dX."""
    return jnp.where(tiles.strictly_lower(X.shape[1]), -matmul.dot_nt(matmul.dot_tn(X, dX), X), 0.0)
