"""Keeping NaN and infinity in one sequence of a stream away from the other sequences, in plain JAX.

Chunks of a packed batch without states are aligned to the stream, so one chunk may hold several sequences. A mask that
multiplies does not keep these apart: 0 times NaN is NaN, and a product reads every row of its operands. So zeros take
the place of a nonfinite sequence before the products, in the forward and in the backward, and its results are NaN.
"""

import functools
from collections.abc import Iterable

import jax
import jax.numpy as jnp

from chunkwise.shared import compat
from chunkwise.shared.kernels import chunking, derivatives, matmul


def tokens_not_finite(tokens: Iterable[jax.Array]) -> jax.Array:
    """Return which tokens hold something that is not finite in any of the arrays [B, T, ...], bool [B, T]."""
    flat = [x.reshape(*x.shape[:2], -1) for x in tokens]
    # A product with zeros is zero unless something is not finite. This is the fastest way to look at a whole token.
    sums = [matmul.dot(x, jnp.zeros((x.shape[0], x.shape[2], 1), x.dtype))[:, :, 0] for x in flat]
    return functools.reduce(jnp.logical_or, [x != 0.0 for x in sums])


def nonfinite_tokens(tokens: Iterable[jax.Array], cu_seqlens: jax.Array) -> jax.Array:
    """Return which tokens belong to a sequence that holds something not finite, bool [T]; False for padding.

    Args:
      tokens: arrays [1, T, ...], floating. Gates of -inf count too: pass them through `clip_gate` first.
      cu_seqlens: int32 [N + 1].
    """
    found = tokens_not_finite(tokens)[0]
    before = jnp.pad(jnp.cumsum(found.astype(jnp.int32), dtype=jnp.int32), (1, 0))  # how many before each token
    in_sequence = before[cu_seqlens[1:]] > before[cu_seqlens[:-1]]
    return jnp.append(in_sequence, False)[chunking.token_owners(found.shape[0], cu_seqlens)]


def keep_apart(o: jax.Array, v: jax.Array, nonfinite: jax.Array, cu_seqlens: jax.Array) -> jax.Array:
    """Return the results of a stream: o, NaN for nonfinite tokens, and zeros for padding.

    In the backward, zeros take the place of the cotangent of every sequence in which it is not finite, and the gradient
    of v gets NaN there, so that the fault is not hidden.

    Args:
      o: [1, T, HV, V], computed with zeros for nonfinite tokens.
      v: the values, of the same shape.
      nonfinite: bool [T], `nonfinite_tokens` of all inputs.
      cu_seqlens: int32 [N + 1].
    """
    o, v, nonfinite, cu_seqlens = compat.vary_alike(o, v, nonfinite, cu_seqlens)

    def transpose(do):
        return chunking.select_tokens(~nonfinite_tokens((do,), cu_seqlens), do)

    o = derivatives.linear(o, transpose)
    # This adds zero. The gradient of v gets zero times the cotangent, which is NaN where the cotangent is not finite.
    o = o + jnp.zeros((), o.dtype) * chunking.zero_padding(v, cu_seqlens).astype(o.dtype)
    return chunking.zero_padding(chunking.select_tokens(~nonfinite, o, jnp.nan), cu_seqlens)
