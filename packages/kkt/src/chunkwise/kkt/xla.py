"""The same chunked computation in plain JAX."""

import jax
import jax.numpy as jnp

from chunkwise.kkt.kernel import kkt_tile


def kkt(k: jax.Array, beta: jax.Array, decay: jax.Array) -> jax.Array:
    """Map the tile over chunks.

    Args:
      k: keys [NC, H, C, K].
      beta: rows [NC, HV, 1, C].
      decay: [NC, HV, C, C], e^(G_i - G_j) where the pair interacts (i > j), else 0.

    Returns:
      A [NC, HV, C, C] float32.
    """
    return jax.vmap(kkt_tile)(k, jnp.swapaxes(beta, -1, -2), decay)
