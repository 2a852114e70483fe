"""The same chunked computation in plain JAX."""

import jax
import jax.numpy as jnp

from chunkwise.chunk_o.kernel import output_tile


def output(q, k, v, h, from_start, decay, scale) -> jax.Array:
    """Map the tile over chunks; float32 result [NC, HV, C, V].

    Args:
      q, k, v, h: chunks, as in the kernel.
      from_start: [NC, HV, 1, C], the decay e^G from the start of the chunk to each token.
      decay: [NC, HV, C, C], e^(G_i - G_j) where the pair interacts (i >= j), else 0.
      scale: multiplies the output.
    """
    axes = (0, 0, 0, 0, 0, 0, None)
    return jax.vmap(output_tile, in_axes=axes)(q, k, v, h, jnp.swapaxes(from_start, -1, -2), decay, scale)
