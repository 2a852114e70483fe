"""The kernels of the interaction matrix and of its gradient: launchers, and both as one differentiable function."""

import jax
import jax.numpy as jnp

from chunkwise.kkt import config, tile
from chunkwise.shared.kernels import chunk_map, gating, tiles


def launch(k: jax.Array, p: jax.Array | None, beta: jax.Array, g: jax.Array, cut: config.Config) -> jax.Array:
    """Run the kernel on chunks: k [NC, H, C, K], beta [NC, HV, 1, C], and g -> A [NC, HV, C, C].

    g are cumulative gates, rows [NC, HV, 1, C] or channels [NC, HV, C, K]; p [NC, HV, C, K] are erase keys, or None.
    """
    C = k.shape[2]
    (A,) = chunk_map.map_chunks(
        tile.kkt_tile,
        (k, beta, g, *([] if p is None else [p])),
        name=f"chunk_scaled_dot_kkt_fwd_{gating.suffix(k, g)}",
        HV=beta.shape[1],
        heads=cut.heads,
        outputs=[((C, C), jnp.float32)],
        cost=config.cost(**gating.sizes(k, g)),
    )
    return A


def launch_bwd(k: jax.Array, p: jax.Array | None, beta: jax.Array, g: jax.Array, dA: jax.Array, cut: config.Config):
    """Run the kernel on chunks with the operands of the forward; return dk in the type of k, dp, dbeta and dg."""
    rows = [] if p is None else [p]
    dk, dbeta, dg, *dp = chunk_map.map_chunks(
        tile.kkt_bwd_tile,
        (k, beta, g, dA, *rows),
        name=f"chunk_scaled_dot_kkt_bwd_{gating.suffix(k, g)}",
        HV=beta.shape[1],
        heads=cut.heads,
        outputs=[*chunk_map.float32_of(k, beta, g), *((y.shape[2:], y.dtype) for y in rows)],
        cost=config.cost(**gating.sizes(k, g), backward=True),
    )
    # The kernel writes gradients per value head; they are summed here over the heads that share a key head.
    return tiles.sum_groups(dk, k.shape[1]).astype(k.dtype), dp[0] if dp else None, dbeta, dg


kkt = chunk_map.differentiable(launch, launch_bwd)
