"""Where the tokens of a device lie in a stream that is split over a mesh axis: T consecutive tokens on every device."""

import jax
import jax.numpy as jnp
from jax import lax

from chunkwise.shared.kernels import chunking


def first_token(T: int, axis) -> jax.Array:
    """Return, int32, the number in the stream of the first token of this device."""
    return lax.axis_index(axis) * jnp.int32(T)


def document_of(token: jax.Array, cu_seqlens: jax.Array) -> jax.Array:
    """Return which document of a packed batch every token is in, int32; N for a token after all of them."""
    return jnp.searchsorted(cu_seqlens[1:], token, side="right").astype(jnp.int32)


def document_ids(cu_seqlens: jax.Array, T: int, axis, before: int) -> jax.Array:
    """Return int32 [1, before + T], the documents of this device's tokens and of `before` earlier ones; -1 for none."""
    token = first_token(T, axis) + jnp.arange(-before, T, dtype=jnp.int32)
    inside = (token >= 0) & (token < cu_seqlens[-1])
    return jnp.where(inside, document_of(token, cu_seqlens), jnp.int32(-1))[None]


def local_boundaries(cu_seqlens: jax.Array, T: int, axis) -> jax.Array:
    """Return the boundaries of the documents within the tokens of this device; documents elsewhere are empty."""
    return jnp.clip(cu_seqlens - first_token(T, axis), 0, T)


def valid_tokens(cu_seqlens: jax.Array | None, segment_ids: jax.Array | None, T: int, axis) -> jax.Array | None:
    """Return which of the T tokens of a device are not padding, bool; None if none can be. The axis may be None."""
    if axis and cu_seqlens is not None:
        cu_seqlens = local_boundaries(cu_seqlens, T, axis)
    return chunking.valid_tokens(cu_seqlens, segment_ids, T)


def documents_end(cu_seqlens: jax.Array, T: int, axis) -> jax.Array:
    """Return bool [N], the documents that end on this device; every document ends on exactly one device."""
    # A document without tokens ends with the token before it.
    device = jnp.clip(lax.div(cu_seqlens[1:] - 1, jnp.int32(T)), 0, lax.axis_size(axis) - 1)
    return device == lax.axis_index(axis)
