"""Decays and decayed products inside one chunk, for both kinds of gates; arrays in, arrays out.

Cumulative gates G of a chunk come per head, as rows [HV, 1, C], or per channel of the key, as [HV, C, K]; the functions
here tell them apart by shape, so a stage is written once. No exponent is ever positive.
"""

from typing import Any

import jax
import jax.numpy as jnp

from chunkwise.shared.kernels import matmul, tiles


def per_channel(g: jax.Array) -> bool:
    """Return whether the gates are per channel [HV, C, K] rather than rows [HV, 1, C]."""
    return g.shape[1] > 1


def suffix(k: jax.Array, g: jax.Array) -> str:
    """Return the end of a kernel's name for chunks k [NC, H, C, K]: its chunk size, and "_gk" for gates per channel."""
    return f"c{k.shape[2]}{'_gk' if g.shape[2] > 1 else ''}"


def sizes(k: jax.Array, g: jax.Array, v: jax.Array | None = None) -> dict[str, Any]:
    """Return the sizes on which the cost of a launch depends, by name; chunks are its batch.

    Without v there is no V, and the size of a number is that of k.
    """
    NC, H, C, K = k.shape
    known = dict(B=NC, T=C, H=H, HV=g.shape[1], K=K, C=C, itemsize=k.dtype.itemsize, per_channel=g.shape[2] > 1)
    return known if v is None else known | {"V": v.shape[3], "itemsize": v.dtype.itemsize}


def decay_from_start(g: jax.Array) -> jax.Array:
    """Return e^G, from the start of the chunk to each token: [HV, C, 1], or [HV, C, K] for gates per channel."""
    return jnp.exp(g if per_channel(g) else tiles.to_column(g))


def gate_gradient(dG: jax.Array, g: jax.Array) -> jax.Array:
    """Return the gradient of G in the form of g, from dG [HV, C, K], the gradient per token and channel."""
    return dG if per_channel(g) else tiles.to_row(jnp.sum(dG, axis=2, keepdims=True))


def _levels(g: jax.Array):
    """Yield (mask, decay, right) for blocks of 2b rows, b = 1, 2, 4, ..., C/2; every pair i > j is in one of the masks.

    mask [1, C, C] has the pairs with i in the right half and j in the left half of one block. Anchored at the last row
    n of the left half, e^(G_i - G_j) is a product of e^(G_i - G_n) and e^(G_n - G_j): decay [HV, C, K] is the factor of
    each row, and right [1, C, 1] marks the rows of right halves.
    """
    C = g.shape[1]
    i, j = tiles.row_index(C), tiles.column_index(C)
    for level in range(C.bit_length() - 1):
        b = 1 << level
        anchor = (i & ~(2 * b - 1)) + b - 1
        # G_i - G_n is one product with a matrix [1, C, C] of 1 and -1, which is exact.
        one, zero = jnp.float32(1.0), jnp.float32(0.0)
        difference = jnp.where(i == j, one, zero) - jnp.where(j == anchor, one, zero)
        difference = matmul.dot(jnp.broadcast_to(difference, (g.shape[0], C, C)), g)
        right = (i[:, :, :1] & b) != 0  # [1, C, 1]
        mask = ((i ^ j) < 2 * b) & ((i & b) > (j & b))  # [1, C, C]
        yield mask, jnp.exp(jnp.where(right, difference, -difference)), right


def decayed_scores(q: jax.Array, k: jax.Array, g: jax.Array) -> jax.Array:
    """Return sum over c of q_ic k_jc e^(G_ic - G_jc) for i > j, else 0.

    Args:
      q, k: [h, C, K] of the key heads.
      g: cumulative gates of the value heads in nats.

    Returns:
      [HV, C, C] float32.
    """
    HV, C = g.shape[0], k.shape[1]
    if not per_channel(g):
        return tiles.pair_decay(tiles.to_column(g), g, tiles.strictly_lower(C)) * tiles.repeat_heads(
            matmul.dot_nt(q, k), HV
        )
    q, k = (tiles.repeat_heads(x, HV).astype(jnp.float32) for x in (q, k))  # [HV, C, K]
    scores = jnp.zeros((HV, C, C), jnp.float32)
    for mask, decay, right in _levels(g):
        scores += jnp.where(
            mask, matmul.dot_nt(jnp.where(right, q * decay, 0.0), jnp.where(right, 0.0, k * decay)), 0.0
        )
    return scores


def decayed_scores_bwd(q: jax.Array, k: jax.Array, g: jax.Array, dP: jax.Array):
    """Return the gradients of `decayed_scores`.

    Args:
      q, k, g: its operands, q and k with a head per value head [HV, C, K].
      dP: cotangent [HV, C, C]; only the pairs i > j are read.

    Returns:
      dq, dk [HV, C, K] and the gradient of G in the form of g.
    """
    C = k.shape[1]
    if not per_channel(g):
        W = dP * tiles.pair_decay(tiles.to_column(g), g, tiles.strictly_lower(C))  # [HV, C, C]
        through = W * matmul.dot_nt(q, k)  # [HV, C, C]
        # Every pair adds its term of `through` to dG_i and takes it from dG_j.
        dg = tiles.to_row(jnp.sum(through, axis=2, keepdims=True)) - jnp.sum(through, axis=1, keepdims=True)
        return matmul.dot(W, k), matmul.dot_tn(W, q), dg
    q, k = q.astype(jnp.float32), k.astype(jnp.float32)
    dq, dk = jnp.zeros(q.shape, jnp.float32), jnp.zeros(k.shape, jnp.float32)
    for mask, decay, right in _levels(g):
        W = jnp.where(mask, dP, 0.0)
        dq += jnp.where(right, decay * matmul.dot(W, k * decay), 0.0)
        dk += jnp.where(right, 0.0, decay * matmul.dot_tn(W, q * decay))
    return dq, dk, q * dq - k * dk
