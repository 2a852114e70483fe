"""The kernels of the interaction matrix and of its gradient: launchers, and both as one differentiable function."""

import jax
import jax.numpy as jnp

from chunkwise.kkt import config, tile
from chunkwise.shared.kernels import chunk_map, gating, tiles


def launch(k: jax.Array, p: jax.Array | None, beta: jax.Array, g: jax.Array, cut: config.Config) -> jax.Array:
    """Run the kernel on chunks: k [NC, H, C, K], beta [NC, HV, 1, C], and g -> A [NC, HV, C, C].

    g are cumulative gates, rows [NC, HV, 1, C] or channels [NC, HV, C, K]; p [NC, HV, C, K] are erase keys, or None.
    """
    NC, H, C, K = k.shape
    HV, kind = beta.shape[1], gating.gate_kind(g)
    (A,) = chunk_map.map_chunks(
        tile.kkt_tile,
        k,
        beta,
        g,
        *([] if p is None else [p]),
        name=f"chunk_scaled_dot_kkt_fwd_c{C}{kind}",
        HV=HV,
        heads=cut.heads,
        outputs=[((C, C), jnp.float32)],
        cost=config.cost(B=NC, T=C, H=H, HV=HV, K=K, C=C, itemsize=k.dtype.itemsize, per_channel=bool(kind)),
    )
    return A


def launch_bwd(k: jax.Array, p: jax.Array | None, beta: jax.Array, g: jax.Array, dA: jax.Array, cut: config.Config):
    """Run the kernel on chunks with the operands of the forward; return dk in the type of k, dp, dbeta and dg."""
    NC, H, C, K = k.shape
    HV, kind, itemsize = beta.shape[1], gating.gate_kind(g), k.dtype.itemsize
    rows = [] if p is None else [p]
    dk, dbeta, dg, *dp = chunk_map.map_chunks(
        tile.kkt_bwd_tile,
        k,
        beta,
        g,
        dA,
        *rows,
        name=f"chunk_scaled_dot_kkt_bwd_c{C}{kind}",
        HV=HV,
        heads=cut.heads,
        outputs=[
            ((C, K), jnp.float32),
            ((1, C), jnp.float32),
            (g.shape[2:], jnp.float32),
            *(((C, K), y.dtype) for y in rows),
        ],
        cost=config.cost(B=NC, T=C, H=H, HV=HV, K=K, C=C, itemsize=itemsize, per_channel=bool(kind), backward=True),
    )
    # The kernel writes gradients per value head; they are summed here over the heads that share a key head.
    return tiles.sum_groups(dk, H).astype(k.dtype), dp[0] if dp else None, dbeta, dg


kkt = chunk_map.differentiable(launch, launch_bwd)
