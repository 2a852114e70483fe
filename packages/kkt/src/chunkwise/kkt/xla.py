"""The same chunked computation in plain JAX."""

import jax

from chunkwise.kkt import tile


def kkt(k: jax.Array, p: jax.Array | None, beta: jax.Array, g: jax.Array) -> jax.Array:
    """Map the tile over chunks, operands as in the kernel: A [NC, HV, C, C] float32."""
    return jax.vmap(tile.kkt_tile)(k, beta, g, p)[0]
