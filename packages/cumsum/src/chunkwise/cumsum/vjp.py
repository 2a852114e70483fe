"""The sum with its gradient, which is the sum in the other direction.

The gradient is defined for the whole function of tokens, and not for the kernel as in the other stages, because a
packed batch is cut into chunks by a gather. JAX's gradient of a gather is a scatter, which is slower than a second
gather.
"""

import functools

import jax
import jax.numpy as jnp

from chunkwise.cumsum import config as tiles
from chunkwise.cumsum import kernel, xla
from chunkwise.shared.kernels import chunking


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3, 4, 5))
@functools.partial(jax.jit, static_argnums=(2, 3, 4, 5))
def cumsum(
    g: jax.Array, cu_seqlens: jax.Array | None, C: int, reverse: bool, implementation: str, config: tiles.Config | None
) -> jax.Array:
    """Return the cumulative sum of g [B, T, H, ...] inside every chunk of C tokens, float32.

    With `reverse` it is the sum from the end of the chunk. If `config` is None, the kernel takes the default one.
    """
    B, T = g.shape[:2]
    chunks = chunking.Chunking(B, T, C, cu_seqlens)
    flat = g.astype(jnp.float32).reshape(B, T, 1, -1)  # [B, T, 1, D]
    rows = chunks.split(flat)[:, 0]  # [NC, C, D]
    if implementation == "pallas":
        rows = kernel.launch(rows, reverse, config or tiles.default_for(*rows.shape))
    else:
        rows = xla.cumsum(rows, reverse)
    return chunks.merge(rows[:, None]).reshape(g.shape)


def _forward(g, cu_seqlens, *static):
    # An empty array remembers the type of g.
    return cumsum(g, cu_seqlens, *static), (cu_seqlens, jnp.zeros((0,), g.dtype))


def _backward(C, reverse, implementation, config, residuals, dg_cum):
    cu_seqlens, empty = residuals
    dg = cumsum(dg_cum, cu_seqlens, C, not reverse, implementation, config)
    return dg.astype(empty.dtype), None


cumsum.defvjp(_forward, _backward)
