"""M_ij = beta_i <k_i, e^(G_i - G_j) k_j> for i > j: tile mathematics, launcher."""

import jax
import jax.numpy as jnp

from chunkwise.kkt.config import Config
from chunkwise.shared.kernels import decayed_scores, gate_kind, map_chunks, to_column


def kkt_tile(k, beta, g):
    """Return the strictly lower interaction matrix of one chunk, as a tuple of one.

    Args:
      k: [h, C, K], keys of the key heads.
      beta: [HV, 1, C].
      g: cumulative gates in nats, rows [HV, 1, C] or per channel [HV, C, K].

    Returns:
      ([HV, C, C] float32,)
    """
    return (to_column(beta) * decayed_scores(k, k, g),)


def launch(k: jax.Array, beta: jax.Array, g: jax.Array, config: Config) -> jax.Array:
    """Run the kernel on chunks: k [NC, H, C, K], beta [NC, HV, 1, C], g rows or channels -> A [NC, HV, C, C]."""
    NC, H, C, K = k.shape
    HV = beta.shape[1]
    (A,) = map_chunks(
        kkt_tile,
        k,
        beta,
        g,
        name=f"chunk_scaled_dot_kkt_fwd_c{C}{gate_kind(g)}",
        HV=HV,
        heads=config.heads,
        outputs=[((C, C), jnp.float32)],
        flops=2 * NC * H * C * C * K,
        transcendentals=NC * HV * C * C,
    )
    return A
