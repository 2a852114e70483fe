"""The same chunked computation in plain JAX."""

import jax
import jax.numpy as jnp
from chunkwise.kkt.kernel import kkt_tile


def kkt(k: jax.Array, beta: jax.Array, g: jax.Array, mask: jax.Array | None = None) -> jax.Array:
    """Map the tile over chunks: k [NC, H, C, K], beta and g [NC, HV, 1, C] -> A [NC, HV, C, C].

    Args:
      k, beta, g: chunks, as in the kernel.
      mask: bool [NC, 1, C, C], pairs that may interact; by default i > j.
    """
    beta_col, g_col = jnp.swapaxes(beta, -1, -2), jnp.swapaxes(g, -1, -2)
    return jax.vmap(kkt_tile, in_axes=(0, 0, 0, 0, None if mask is None else 0))(k, beta_col, g_col, g, mask)
