"""The sum with its gradient, which is the sum in the other direction.

The gradient is defined for the whole function of tokens, and not for the kernel as in the other stages, because a
packed batch is cut into chunks by a gather. JAX's gradient of a gather is a scatter, which is slower than a second
gather.
"""

import functools

import jax
import jax.numpy as jnp

from chunkwise.cumsum import config as tiles
from chunkwise.cumsum import kernel
from chunkwise.cumsum import xla as plain
from chunkwise.shared.call import configs
from chunkwise.shared.kernels import chunking, derivatives


def cumsum(
    g: jax.Array, cu_seqlens: jax.Array | None, C: int, reverse: bool, implementation: str, config: tiles.Config | None
) -> jax.Array:
    """Return the cumulative sum of g [B, T, H, ...] inside every chunk of C tokens, float32.

    With `reverse` it is the sum from the end of the chunk. If `config` is None, the kernel takes the default one.
    """
    if implementation == "pallas":
        return _with_kernel(derivatives.of_kernel("chunk_local_cumsum", g), cu_seqlens, C, reverse, config)
    run = functools.partial(_sum, cu_seqlens=cu_seqlens, C=C, config=None, xla=True)
    forward, transpose = (functools.partial(run, reverse=way) for way in (reverse, not reverse))
    return derivatives.linear(g.astype(jnp.float32), transpose, forward)


@functools.partial(jax.jit, static_argnames=("C", "reverse", "config", "xla"))
def _sum(g, cu_seqlens, C: int, reverse: bool, config: tiles.Config | None, *, xla: bool):
    B, T = g.shape[:2]
    chunks = chunking.Chunking(B, T, C, cu_seqlens)
    flat = g.astype(jnp.float32).reshape(B, T, 1, -1)  # [B, T, 1, D]
    rows = chunks.split(flat)[:, 0]  # [NC, C, D]
    if xla:
        rows = plain.cumsum(rows, reverse)
    else:
        rows = kernel.launch(rows, reverse, _checked(config or tiles.default_for(*rows.shape), *rows.shape))
    return chunks.merge(rows[:, None]).reshape(g.shape)


def _checked(config: tiles.Config, NC: int, C: int, gates: int) -> tiles.Config:
    configs.check_divides("chunks", config.chunks, NC, "chunks")
    configs.check_divides("lanes", config.lanes, gates, "gates of a token")
    return config


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3, 4))
def _with_kernel(g, cu_seqlens, C: int, reverse: bool, config: tiles.Config | None):
    return _sum(g, cu_seqlens, C, reverse, config, xla=False)


def _forward(g, cu_seqlens, *static):
    # An empty array remembers the type of g.
    return _with_kernel(g, cu_seqlens, *static), (cu_seqlens, jnp.zeros((0,), g.dtype))


def _backward(C, reverse, config, residuals, dg_cum):
    cu_seqlens, empty = residuals
    dg = _with_kernel(dg_cum, cu_seqlens, C, not reverse, config)
    return dg.astype(empty.dtype), None


_with_kernel.defvjp(_forward, _backward)
