"""The kernels of w and u and of their gradient: their launchers, and both as one differentiable function."""

import jax

from chunkwise.shared.kernels import chunk_map, gating, tiles
from chunkwise.wy_fast import config, tile


def launch(
    k: jax.Array, v: jax.Array, A_inv: jax.Array, beta: jax.Array, g: jax.Array, cut: config.Config
) -> tuple[jax.Array, jax.Array]:
    """Run the kernel on chunks.

    k [NC, H, C, K], v [NC, HV, C, V], A_inv [NC, HV, C, C], beta [NC, HV, 1, C], g rows [NC, HV, 1, C] or channels
    [NC, HV, C, K] -> w [NC, HV, C, K] and u [NC, HV, C, V], float32.
    """
    w, u = chunk_map.map_chunks(
        tile.wy_gates_tile,
        (k, v, A_inv, beta, g),
        name=f"recompute_w_u_fwd_{gating.suffix(k, g)}",
        HV=v.shape[1],
        heads=cut.heads,
        outputs=chunk_map.float32_of(k, v),
        cost=config.cost(**gating.sizes(k, g, v)),
    )
    return w, u


def launch_bwd(k, v, A_inv, beta, g, dw: jax.Array, du: jax.Array, cut: config.Config):
    """Run the kernel on chunks; return the gradients of all operands of the forward, in their types."""
    dk, dv, dA_inv, dbeta, dg = chunk_map.map_chunks(
        tile.wy_bwd_tile,
        (k, v, A_inv, beta, g, dw, du),
        name=f"recompute_w_u_bwd_{gating.suffix(k, g)}",
        HV=v.shape[1],
        heads=cut.heads,
        outputs=[*chunk_map.float32_of(k), (v.shape[2:], v.dtype), *chunk_map.float32_of(A_inv, beta, g)],
        cost=config.cost(**gating.sizes(k, g, v), backward=True),
    )
    # The kernel writes gradients per value head; they are summed here over the heads that share a key head.
    return tiles.sum_groups(dk, k.shape[1]).astype(k.dtype), dv, dA_inv, dbeta, dg


w_u = chunk_map.differentiable(launch, launch_bwd)
