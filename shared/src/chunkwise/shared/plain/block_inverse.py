"""The exact inverse of unit lower triangular matrices in plain JAX: substitution by blocks."""

import jax
import jax.numpy as jnp
from jax import lax

from chunkwise.shared import compat
from chunkwise.shared.kernels import matmul, tiles

# Blocks of this size or less are inverted row by row, for all matrices at once: products of them are too small to be
# faster.
_BASE = 16


def _substitute(A):
    """Return (I + A)^-1 for small matrices [M, b, b], row by row: X_r = e_r - sum over j < r of A_rj X_j."""
    size = A.shape[-1]
    identity = (tiles.row_index(size) == tiles.column_index(size))[0].astype(A.dtype)  # [b, b]
    rows = [jnp.broadcast_to(identity[:1], A[:, 0].shape)]
    for r in range(1, size):
        known = jnp.stack(rows, axis=1)
        rows.append(identity[r : r + 1] - jnp.sum(A[:, r, :r, None] * known, axis=1))
    return jnp.stack(rows, axis=1)


def _invert(A):
    size = A.shape[-1]
    if size <= _BASE:
        return _substitute(A)
    half = size // 2
    # The diagonal blocks of all matrices in one call: first the upper left blocks, then the lower right ones.
    X = _invert(jnp.concatenate([A[:, :half, :half], A[:, half:, half:]]))
    upper, lower = jnp.split(X, 2)
    corner = -matmul.dot(lower, matmul.dot(A[:, half:, :half], upper), jnp.float32)
    top = jnp.concatenate([upper, jnp.zeros_like(upper)], axis=2)
    return jnp.concatenate([top, jnp.concatenate([corner, lower], axis=2)], axis=1)


@jax.custom_jvp
def block_inverse(A: jax.Array) -> jax.Array:
    """Return (I + A)^-1 for A [M, C, C], strictly lower; entries on and above the diagonal are not read."""
    return _invert(A)


@block_inverse.defjvp
def _inverse_jvp(primals, tangents):
    A_inv, (dA,) = block_inverse(*primals), tangents
    return A_inv, -matmul.dot(A_inv, matmul.dot(jnp.where(tiles.strictly_lower(dA.shape[1]), dA, 0.0), A_inv))


def known_inverse(A: jax.Array, A_inv: jax.Array) -> jax.Array:
    """Return A_inv, which is `block_inverse` of A. The gradient goes to A alone, as if A_inv were computed here."""
    A, A_inv, identity = compat.vary_alike(A, A_inv, jnp.eye(A.shape[1], dtype=A.dtype))
    A = jnp.where(tiles.strictly_lower(A.shape[1]), A, 0.0)
    # A function with a derivative of our own would lose it in second derivatives, where JAX takes the function itself.
    return lax.custom_linear_solve(
        lambda X: X + matmul.dot(A, X), jnp.broadcast_to(identity, A.shape), lambda _, R: matmul.dot(A_inv, R),
        lambda _, R: matmul.dot_tn(A_inv, R),
    )  # fmt: skip
