"""The kernel of the gradient of the output: its launcher."""

import jax
import jax.numpy as jnp

from chunkwise.chunk_o import config, cost, tile
from chunkwise.shared.kernels import chunk_map, gating, tiles


def launch(q, k, v, h, g, scale: jax.Array, do: jax.Array, config: config.Config):
    """Run the kernel on chunks: the gradients of all operands of the forward but the scale, in their types."""
    NC, HV, C, V = v.shape
    H, K = k.shape[1], k.shape[3]
    kind, itemsize = gating.gate_kind(g), v.dtype.itemsize
    dq, dk, dv, dh, dg = chunk_map.map_chunks(
        tile.output_bwd_tile,
        q,
        k,
        v,
        h,
        g,
        do,
        scalars=(scale,),
        name=f"chunk_fwd_o_bwd_c{C}{kind}",
        HV=HV,
        heads=config.heads,
        outputs=[
            ((C, K), jnp.float32),
            ((C, K), jnp.float32),
            ((C, V), v.dtype),
            ((K, V), jnp.float32),
            (g.shape[2:], jnp.float32),
        ],
        cost=cost.cost(B=NC, T=C, H=H, HV=HV, K=K, V=V, C=C, itemsize=itemsize, per_channel=bool(kind), backward=True),
    )
    # The kernel writes a gradient per value head; those that share a key head are summed here.
    return tiles.sum_groups(dq, H).astype(q.dtype), tiles.sum_groups(dk, H).astype(k.dtype), dv, dh, dg
