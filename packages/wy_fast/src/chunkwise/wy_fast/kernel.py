"""The kernels of w and u and of their gradient: their launchers, and both as one differentiable function."""

import jax
import jax.numpy as jnp

from chunkwise.shared.kernels import chunk_map, gating, tiles
from chunkwise.wy_fast import config, tile


def launch(
    k: jax.Array, v: jax.Array, A_inv: jax.Array, beta: jax.Array, g: jax.Array, cut: config.Config
) -> tuple[jax.Array, jax.Array]:
    """Run the kernel on chunks.

    k [NC, H, C, K], v [NC, HV, C, V], A_inv [NC, HV, C, C], beta [NC, HV, 1, C], g rows [NC, HV, 1, C] or channels
    [NC, HV, C, K] -> w [NC, HV, C, K] and u [NC, HV, C, V], float32.
    """
    NC, HV, C, V = v.shape
    H, K = k.shape[1], k.shape[3]
    kind, itemsize = gating.gate_kind(g), v.dtype.itemsize
    w, u = chunk_map.map_chunks(
        tile.wy_gates_tile,
        k,
        v,
        A_inv,
        beta,
        g,
        name=f"recompute_w_u_fwd_c{C}{kind}",
        HV=HV,
        heads=cut.heads,
        outputs=[((C, K), jnp.float32), ((C, V), jnp.float32)],
        cost=config.cost(B=NC, T=C, H=H, HV=HV, K=K, V=V, C=C, itemsize=itemsize, per_channel=bool(kind)),
    )
    return w, u


def launch_bwd(k, v, A_inv, beta, g, dw: jax.Array, du: jax.Array, cut: config.Config):
    """Run the kernel on chunks; return the gradients of all operands of the forward, in their types."""
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
        heads=cut.heads,
        outputs=[
            ((C, K), jnp.float32),
            ((C, V), v.dtype),
            ((C, C), jnp.float32),
            ((1, C), jnp.float32),
            (g.shape[2:], jnp.float32),
        ],
        cost=config.cost(
            B=NC, T=C, H=H, HV=HV, K=K, V=V, C=C, itemsize=itemsize, per_channel=bool(kind), backward=True
        ),
    )
    # The kernel writes gradients per value head; they are summed here over the heads that share a key head.
    return tiles.sum_groups(dk, H).astype(k.dtype), dv, dA_inv, dbeta, dg


w_u = chunk_map.differentiable(launch, launch_bwd)
