"""The kernel of the gradient of the interaction matrix: its launcher."""

import jax
import jax.numpy as jnp

from chunkwise.kkt import config, cost, tile
from chunkwise.shared.kernels import chunk_map, gating, tiles


def launch(k: jax.Array, beta: jax.Array, g: jax.Array, dA: jax.Array, config: config.Config):
    """Run the kernel on chunks, operands as in the forward: returns dk in the type of k, dbeta and dg."""
    NC, H, C, K = k.shape
    HV, kind, itemsize = beta.shape[1], gating.gate_kind(g), k.dtype.itemsize
    dk, dbeta, dg = chunk_map.map_chunks(
        tile.kkt_bwd_tile,
        k,
        beta,
        g,
        dA,
        name=f"chunk_scaled_dot_kkt_bwd_c{C}{kind}",
        HV=HV,
        heads=config.heads,
        outputs=[((C, K), jnp.float32), ((1, C), jnp.float32), (g.shape[2:], jnp.float32)],
        cost=cost.cost(B=NC, T=C, H=H, HV=HV, K=K, C=C, itemsize=itemsize, per_channel=bool(kind), backward=True),
    )
    # The kernel writes a gradient per value head; those that share a key head are summed here.
    return tiles.sum_groups(dk, H).astype(k.dtype), dbeta, dg
