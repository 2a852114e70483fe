"""The kernel of the cumulative sum: its body and its launcher."""

import functools

import jax
import jax.numpy as jnp

from chunkwise.cumsum import config, tile
from chunkwise.shared import compat
from chunkwise.shared.kernels import launcher, windows


def _cumsum_kernel(g_ref, g_cum_ref, *, reverse):
    g_cum_ref[...] = tile.cumsum_tile(g_ref[...], reverse)  # [chunks, C, lanes]


def launch(g: jax.Array, reverse: bool, cut: config.Config) -> jax.Array:
    """Run the kernel on chunks g [NC, C, D] float32 -> [NC, C, D] float32."""
    NC, C, D = g.shape
    block = windows.along((cut.chunks, C, cut.lanes), 0, None, 1)
    return launcher.pallas_call(
        functools.partial(_cumsum_kernel, reverse=reverse),
        g,
        name=f"chunk_local_cumsum_fwd_c{C}" + ("_reverse" if reverse else ""),
        # Chunks and gates are independent.
        grid=(NC // cut.chunks, D // cut.lanes),
        dimension_semantics=("parallel", "parallel"),
        in_specs=[block],
        out_specs=block,
        out_shape=compat.out_struct(g.shape, jnp.float32, g),
        cost_estimate=config.cost(B=NC, T=C, H=D, C=C),
    )
