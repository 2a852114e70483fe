"""The kernel of the gradient of the effective keys and values: its launcher."""

import jax
import jax.numpy as jnp

from chunkwise.shared.kernels import chunk_map, gating, tiles
from chunkwise.wy_fast import config, cost, tile


def launch(k, v, A_inv, beta, g, dw: jax.Array, du: jax.Array, config: config.Config):
    """Run the kernel on chunks: the gradients of all operands of the forward, in their types."""
    NC, HV, C, V = v.shape
    H, K = k.shape[1], k.shape[3]
    kind, itemsize = gating.gate_kind(g), v.dtype.itemsize
    dk, dv, dA_inv, dbeta, dg = chunk_map.map_chunks(
        tile.wy_bwd_tile,
        k,
        v,
        A_inv,
        beta,
        g,
        dw,
        du,
        name=f"recompute_w_u_bwd_c{C}{kind}",
        HV=HV,
        heads=config.heads,
        outputs=[
            ((C, K), jnp.float32),
            ((C, V), v.dtype),
            ((C, C), jnp.float32),
            ((1, C), jnp.float32),
            (g.shape[2:], jnp.float32),
        ],
        cost=cost.cost(B=NC, T=C, H=H, HV=HV, K=K, V=V, C=C, itemsize=itemsize, per_channel=bool(kind), backward=True),
    )
    # The kernel writes a gradient per value head; those that share a key head are summed here.
    return tiles.sum_groups(dk, H).astype(k.dtype), dv, dA_inv, dbeta, dg
