"""Segments: sequences that follow one another in the rows of a batch, told apart by an id of every token.

A segment begins where the id changes. Tokens of ids below 0 are padding, which may stand anywhere in a row. Padding
leaves a state as it is, so it counts as a part of the segment before it: the state after the padding is the state
before it.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from chunkwise.shared.kernels import chunking

# Tokens of a block of `scan_rows`.
_BLOCK = 1024


class Segments(NamedTuple):
    """The segments of the rows of a batch.

    Attributes:
      owner: int32 [B, T], which segment of its row a token belongs to, counted from 0. Padding belongs to the segment
        before it, or to the first.
      valid: bool [B, T], False for padding.
      begins: bool [B, T], the tokens at which the state starts anew: the first token of every segment except the first
        segment of a row.
    """

    owner: jax.Array
    valid: jax.Array
    begins: jax.Array


def scan_rows(scan: Callable, combine: Callable, x: jax.Array, reverse: bool = False) -> jax.Array:
    """Return scan(x, axis=1) of x int32 [B, T], where `combine` joins two results of a scan.

    For a TPU, XLA takes minutes to compile a scan over a million tokens. So it goes over blocks of them.
    """
    B, T = x.shape
    if T <= 32 * _BLOCK:
        return scan(x, axis=1, reverse=reverse)
    x = jnp.flip(x, 1) if reverse else x
    blocks = jnp.swapaxes(jnp.pad(x, ((0, 0), (0, -T % _BLOCK))).reshape(B, -1, _BLOCK), 1, 2)
    inside = scan(blocks, axis=1)  # [B, _BLOCK, blocks]
    before = scan(inside[:, -1], axis=1)[:, None, :-1]
    whole = jnp.concatenate([inside[:, :, :1], combine(inside[:, :, 1:], before)], axis=2)
    found = jnp.swapaxes(whole, 1, 2).reshape(B, -1)[:, :T]
    return jnp.flip(found, 1) if reverse else found


def runs(ids: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return int32 [B, T], the first and the last token of the run of equal ids [B, T] that every token is in."""
    T, token = ids.shape[1], jnp.arange(ids.shape[1], dtype=jnp.int32)[None]
    change = ids[:, 1:] != ids[:, :-1]
    first = jnp.pad(change, ((0, 0), (1, 0)), constant_values=True)
    last = jnp.pad(change, ((0, 0), (0, 1)), constant_values=True)
    start = scan_rows(lax.cummax, jnp.maximum, jnp.where(first, token, jnp.int32(0)))
    return start, scan_rows(lax.cummin, jnp.minimum, jnp.where(last, token, jnp.int32(T)), reverse=True)


def find_segments(segment_ids: jax.Array) -> Segments:
    """Return the segments of rows with these ids [B, T]."""
    valid = segment_ids >= 0
    before = jnp.pad(segment_ids[:, :-1], ((0, 0), (1, 0)), constant_values=-1)
    begins = valid & (segment_ids != before)
    count = scan_rows(lax.cumsum, jnp.add, begins.astype(jnp.int32))
    return Segments(jnp.maximum(count - 1, 0), valid, begins & (count > 1))


def coded_owners(cu_seqlens: jax.Array | None, segment_ids: jax.Array | None, T: int) -> jax.Array:
    """Return int32 [B, T], the sequence of every token, and for padding the complement of the sequence before it.

    Args:
      cu_seqlens: int32 [N + 1], boundaries of a packed batch, or None.
      segment_ids: int32 [B, T], or None.
      T: tokens of a row.
    """
    if segment_ids is not None:
        segments = find_segments(segment_ids)
        return jnp.where(segments.valid, segments.owner, ~segments.owner)
    assert cu_seqlens is not None
    owner, last = chunking.token_owners(T, cu_seqlens)[None], jnp.int32(cu_seqlens.shape[0] - 2)
    # Tokens past the last boundary are padding of the last sequence, even if this sequence is empty.
    return jnp.where(owner <= last, owner, ~last)


def decoded(owner: jax.Array) -> jax.Array:
    """Return the sequences of tokens from `coded_owners`; for padding, the sequence before it."""
    # The complement of x where x is negative, and x elsewhere, without a selection.
    return owner ^ lax.shift_right_arithmetic(owner, jnp.full_like(owner, 31))
