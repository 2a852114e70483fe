"""M_ij = beta_i <k_i, k_j> exp(G_i - G_j) for i > j: tile mathematics, launcher."""

import jax
import jax.numpy as jnp

from chunkwise.kkt.config import Config
from chunkwise.shared import dot_nt, map_chunks, pair_decay, repeat_heads, strictly_lower, to_column


def kkt_tile(k, beta_col, decay):
    """Return the strictly lower interaction matrix of one chunk.

    Args:
      k: [h, C, K], keys of the key heads.
      beta_col: [HV, C, 1].
      decay: [HV, C, C], e^(G_i - G_j) where the pair interacts (i > j), else 0.

    Returns:
      [HV, C, C] float32.
    """
    return beta_col * decay * repeat_heads(dot_nt(k, k), beta_col.shape[0])


def kkt_rows_tile(k, beta, g):
    """Return `kkt_tile` from rows: k [h, C, K], beta and cumulative gates g [HV, 1, C]."""
    decay = pair_decay(to_column(g), g, strictly_lower(g.shape[-1]))
    return (kkt_tile(k, to_column(beta), decay),)


def launch(k: jax.Array, beta: jax.Array, g: jax.Array, config: Config) -> jax.Array:
    """Run the kernel on chunks: k [NC, H, C, K], beta and g [NC, HV, 1, C] -> A [NC, HV, C, C]."""
    NC, H, C, K = k.shape
    HV = beta.shape[1]
    (A,) = map_chunks(
        kkt_rows_tile,
        k,
        beta,
        g,
        name=f"chunk_scaled_dot_kkt_fwd_c{C}",
        HV=HV,
        heads=config.heads,
        outputs=[((C, C), jnp.float32)],
        flops=2 * NC * H * C * C * K,
        transcendentals=NC * HV * C * C,
    )
    return A
