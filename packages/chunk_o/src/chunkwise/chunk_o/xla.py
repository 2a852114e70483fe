"""The output in plain JAX, chunk by chunk."""

import jax

from chunkwise.chunk_o import tile


def output(q, k, v, h, from_start, scores, scale) -> jax.Array:
    """Run the tile function on all chunks; return [NC, HV, C, V] float32.

    Args:
      q, k, v, h: chunks, as in the kernel.
      from_start: [NC, HV, C, 1 or K], the decay e^G from the start of the chunk to each token.
      scores: [NC, HV, C, C], the decayed products of queries and keys for i > j, else 0.
      scale: multiplies the output.
    """
    return jax.vmap(tile.output_tile, in_axes=(0, 0, 0, 0, 0, 0, None))(q, k, v, h, from_start, scores, scale)
