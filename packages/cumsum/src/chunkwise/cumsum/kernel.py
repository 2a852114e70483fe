"""G_i = sum of g over the first i + 1 rows of a chunk: tile mathematics, kernel body, launcher."""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from chunkwise.cumsum.config import Config
from chunkwise.shared.compat import out_struct
from chunkwise.shared.kernels import column_index, dot, pallas_call, row_index


def cumsum_tile(g, reverse: bool):
    """Return the inclusive cumulative sum of g [n, C, D] over its rows.

    A product with a triangle of ones: the products are exact and every sum is formed from the gates themselves.
    """
    C = g.shape[1]
    i, j = row_index(C), column_index(C)
    ones = jnp.where(i <= j if reverse else i >= j, 1.0, 0.0)
    return dot(jnp.broadcast_to(ones, (g.shape[0], C, C)), g)


def _cumsum_kernel(g_ref, g_cum_ref, *, reverse):
    g_cum_ref[...] = cumsum_tile(g_ref[...], reverse)


def launch(g: jax.Array, reverse: bool, config: Config) -> jax.Array:
    """Run the kernel on chunks g [NC, C, D] float32 -> [NC, C, D] float32."""
    NC, C, D = g.shape
    block = pl.BlockSpec((config.chunks, C, config.lanes), lambda n, d: (n, 0, d))
    return pallas_call(
        functools.partial(_cumsum_kernel, reverse=reverse),
        g,
        name=f"chunk_local_cumsum_fwd_c{C}" + ("_reverse" if reverse else ""),
        # Chunks and gates are independent.
        grid=(NC // config.chunks, D // config.lanes),
        dimension_semantics=("parallel", "parallel"),
        in_specs=[block],
        out_specs=block,
        out_shape=out_struct(g.shape, jnp.float32, g),
        cost_estimate=pl.CostEstimate(flops=2 * C * g.size, transcendentals=0, bytes_accessed=8 * g.size),
    )
