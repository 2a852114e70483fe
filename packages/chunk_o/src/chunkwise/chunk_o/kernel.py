"""The kernels of the output and of its gradient: their launchers, and both as one differentiable function."""

import jax

from chunkwise.chunk_o import config, tile
from chunkwise.shared.kernels import chunk_map, gating, tiles


def launch(q, k, v, h, g, scale: jax.Array, cut: config.Config) -> jax.Array:
    """Run the kernel on chunks.

    q, k [NC, H, C, K], v [NC, HV, C, V], h [NC, HV, K, V], g rows [NC, HV, 1, C] or channels [NC, HV, C, K], scale
    float32 [1] -> o [NC, HV, C, V] in the type of v.
    """
    (o,) = chunk_map.map_chunks(
        tile.output_gates_tile,
        (q, k, v, h, g),
        scalars=(scale,),
        name=f"chunk_fwd_o_fwd_{gating.suffix(k, g)}",
        HV=v.shape[1],
        heads=cut.heads,
        outputs=[(v.shape[2:], v.dtype)],
        cost=config.cost(**gating.sizes(k, g, v)),
    )
    return o


def launch_bwd(q, k, v, h, g, scale: jax.Array, do: jax.Array, cut: config.Config):
    """Run the kernel on chunks; return the gradients of all operands of the forward, in their types.

    The scale gets no gradient, because it is a known number here: `api` multiplies by a traced scale after the kernel.
    """
    H = k.shape[1]
    dq, dk, dv, dh, dg = chunk_map.map_chunks(
        tile.output_bwd_tile,
        (q, k, v, h, g, do),
        scalars=(scale,),
        name=f"chunk_fwd_o_bwd_{gating.suffix(k, g)}",
        HV=v.shape[1],
        heads=cut.heads,
        outputs=[*chunk_map.float32_of(q, k), (v.shape[2:], v.dtype), *chunk_map.float32_of(h, g)],
        cost=config.cost(**gating.sizes(k, g, v), backward=True),
    )
    # The kernel writes gradients per value head; they are summed here over the heads that share a key head.
    return tiles.sum_groups(dq, H).astype(q.dtype), tiles.sum_groups(dk, H).astype(k.dtype), dv, dh, dg, None


output = chunk_map.differentiable(launch, launch_bwd)
