"""M_ij = beta_i <k_i, e^(G_i - G_j) k_j> for i > j, and its gradient; arrays in, arrays out."""

import jax.numpy as jnp

from chunkwise.shared.kernels import gating, tiles


def kkt_tile(k, beta, g):
    """Return the strictly lower interaction matrix of one chunk, as a tuple of one.

    Args:
      k: [h, C, K], keys of the key heads.
      beta: [HV, 1, C].
      g: cumulative gates in nats, rows [HV, 1, C] or per channel [HV, C, K].

    Returns:
      ([HV, C, C] float32,)
    """
    return (tiles.to_column(beta) * gating.decayed_scores(k, k, g),)


def kkt_bwd_tile(k, beta, g, dA):
    """Return dk [HV, C, K], dbeta [HV, 1, C] and dg in the form of g; operands as in the forward, dA [HV, C, C]."""
    dbeta = jnp.sum(dA * gating.decayed_scores(k, k, g), axis=2, keepdims=True)  # [HV, C, 1]
    k = tiles.repeat_heads(k, beta.shape[0])  # [HV, C, K]
    # Every key is once the row and once the column.
    dk_row, dk_column, dg = gating.decayed_scores_bwd(k, k, g, tiles.to_column(beta) * dA)
    return dk_row + dk_column, tiles.to_row(dbeta), dg
