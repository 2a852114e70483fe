"""The kernel of the interaction matrix: its launcher."""

import jax
import jax.numpy as jnp

from chunkwise.kkt import config, cost, tile
from chunkwise.shared.kernels import chunk_map, gating


def launch(k: jax.Array, beta: jax.Array, g: jax.Array, config: config.Config) -> jax.Array:
    """Run the kernel on chunks: k [NC, H, C, K], beta [NC, HV, 1, C], g rows or channels -> A [NC, HV, C, C]."""
    NC, H, C, K = k.shape
    HV, kind = beta.shape[1], gating.gate_kind(g)
    (A,) = chunk_map.map_chunks(
        tile.kkt_tile,
        k,
        beta,
        g,
        name=f"chunk_scaled_dot_kkt_fwd_c{C}{kind}",
        HV=HV,
        heads=config.heads,
        outputs=[((C, C), jnp.float32)],
        cost=cost.cost(B=NC, T=C, H=H, HV=HV, K=K, C=C, itemsize=k.dtype.itemsize, per_channel=bool(kind)),
    )
    return A
