"""A_ij = beta_i <p_i, e^(G_i - G_j) k_j> for i > j, p = k or erase keys, and its gradient; arrays in, arrays out."""

import jax.numpy as jnp

from chunkwise.shared.kernels import gating, tiles


def kkt_tile(k, beta, g, p=None):
    """Return the strictly lower interaction matrix of one chunk, in a tuple of one.

    Args:
      k: [h, C, K], keys of the key heads.
      beta: [HV, 1, C].
      g: cumulative gates in nats, rows [HV, 1, C] or per channel [HV, C, K].
      p: [HV, C, K], erase keys, or None for k.

    Returns:
      ([HV, C, C] float32,)
    """
    return (tiles.to_column(beta) * _scores(k, g, p),)


def _scores(k, g, p):
    return gating.decayed_scores(k, k, g) if p is None else gating.decayed_scores(p, tiles.repeat_heads(k, len(p)), g)


def kkt_bwd_tile(k, beta, g, dA, p=None):
    """Return the gradients by name, k and p [HV, C, K], from the operands of the forward and dA [HV, C, C]."""
    dbeta = jnp.sum(dA * _scores(k, g, p), axis=2, keepdims=True)  # [HV, C, 1]
    k = tiles.repeat_heads(k, beta.shape[0])  # [HV, C, K]
    d_row, d_column, dg = gating.decayed_scores_bwd(k if p is None else p, k, g, tiles.to_column(beta) * dA)
    gradients = {"beta": tiles.to_row(dbeta), "g": dg}
    # Without erase keys, every key occurs in a row and in a column.
    return gradients | ({"k": d_row + d_column} if p is None else {"k": d_column, "p": d_row})
