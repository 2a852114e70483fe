"""The kernels of the output and of its gradient: their launchers, and both as one differentiable function."""

import jax
import jax.numpy as jnp

from chunkwise.chunk_o import config, tile
from chunkwise.shared.kernels import chunk_map, gating, tiles


def launch(q, k, v, h, g, scale: jax.Array, cut: config.Config) -> jax.Array:
    """Run the kernel on chunks.

    q, k [NC, H, C, K], v [NC, HV, C, V], h [NC, HV, K, V], g rows [NC, HV, 1, C] or channels [NC, HV, C, K], scale
    float32 [1] -> o [NC, HV, C, V] in the type of v.
    """
    NC, HV, C, V = v.shape
    H, K = k.shape[1], k.shape[3]
    kind, itemsize = gating.gate_kind(g), v.dtype.itemsize
    (o,) = chunk_map.map_chunks(
        tile.output_gates_tile,
        q,
        k,
        v,
        h,
        g,
        scalars=(scale,),
        name=f"chunk_fwd_o_fwd_c{C}{kind}",
        HV=HV,
        heads=cut.heads,
        outputs=[((C, V), v.dtype)],
        cost=config.cost(B=NC, T=C, H=H, HV=HV, K=K, V=V, C=C, itemsize=itemsize, per_channel=bool(kind)),
    )
    return o


def launch_bwd(q, k, v, h, g, scale: jax.Array, do: jax.Array, cut: config.Config):
    """Run the kernel on chunks; return the gradients of all operands of the forward, in their types.

    The scale gets no gradient, because it is a known number here: `api` multiplies by a traced scale after the kernel.
    """
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
        heads=cut.heads,
        outputs=[
            ((C, K), jnp.float32),
            ((C, K), jnp.float32),
            ((C, V), v.dtype),
            ((K, V), jnp.float32),
            (g.shape[2:], jnp.float32),
        ],
        cost=config.cost(
            B=NC, T=C, H=H, HV=HV, K=K, V=V, C=C, itemsize=itemsize, per_channel=bool(kind), backward=True
        ),
    )
    # The kernel writes gradients per value head; they are summed here over the heads that share a key head.
    return tiles.sum_groups(dq, H).astype(q.dtype), tiles.sum_groups(dk, H).astype(k.dtype), dv, dh, dg, None


output = chunk_map.differentiable(launch, launch_bwd)
