"""The same chunked computation in plain JAX."""

import jax

from chunkwise.wy_fast import tile


def w_u(k: jax.Array, v: jax.Array, A_inv: jax.Array, beta: jax.Array, from_start: jax.Array):
    """Map the tile over chunks; float32 results.

    Args:
      k, v, A_inv, beta: chunks, as in the kernel.
      from_start: [NC, HV, C, 1 or K], the decay from the start of the chunk to each token.

    Returns:
      w [NC, HV, C, K] and u [NC, HV, C, V].
    """
    return jax.vmap(tile.wy_tile)(k, v, A_inv, beta, from_start)
