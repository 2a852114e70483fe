"""The effective keys and values in plain JAX, chunk by chunk."""

import jax

from chunkwise.wy_fast import tile


def w_u(k: jax.Array, v: jax.Array, A_inv: jax.Array, beta: jax.Array, from_start: jax.Array):
    """Run the tile function on all chunks; the results are float32.

    Args:
      k, v, A_inv, beta: chunks, as in the kernel.
      from_start: [NC, HV, C, 1 or K], the decay from the start of the chunk to each token.

    Returns:
      w [NC, HV, C, K] and u [NC, HV, C, V].
    """
    return jax.vmap(tile.wy_tile)(k, v, A_inv, beta, from_start)
