"""The interaction matrix in plain JAX, chunk by chunk."""

import jax

from chunkwise.kkt import tile


def kkt(k: jax.Array, p: jax.Array | None, beta: jax.Array, g: jax.Array) -> jax.Array:
    """Run the tile function on all chunks, with the operands of the kernel; return A [NC, HV, C, C] float32."""
    return jax.vmap(tile.kkt_tile)(k, beta, g, p)[0]
