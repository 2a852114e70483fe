"""The kernel of the effective keys and values: its launcher."""

import jax
import jax.numpy as jnp

from chunkwise.shared.kernels import chunk_map, gating
from chunkwise.wy_fast import config, cost, tile


def launch(
    k: jax.Array, v: jax.Array, A_inv: jax.Array, beta: jax.Array, g: jax.Array, config: config.Config
) -> tuple[jax.Array, jax.Array]:
    """Run the kernel on chunks.

    k [NC, H, C, K], v [NC, HV, C, V], A_inv [NC, HV, C, C], beta [NC, HV, 1, C], g rows or channels ->
    w [NC, HV, C, K] and u [NC, HV, C, V], float32.
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
        heads=config.heads,
        outputs=[((C, K), jnp.float32), ((C, V), jnp.float32)],
        cost=cost.cost(B=NC, T=C, H=H, HV=HV, K=K, V=V, C=C, itemsize=itemsize, per_channel=bool(kind)),
    )
    return w, u
