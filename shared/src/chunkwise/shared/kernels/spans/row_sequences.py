"""Where sequences begin and end in the rows of a batch: in rows, in a packed batch, or in rows of segments."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from chunkwise.shared.kernels.spans import segment_tables


class RowSequences(NamedTuple):
    """The sequences of a batch. All are int32 arrays.

    Attributes:
      age: [B, T], how many tokens of its sequence are before a token; -1 for padding. None if every row is one
        sequence.
      left: [B, T], how many tokens of its sequence are after a token; -1 and None as for age.
      row: [N], the row of the batch that states belong to.
      start, length: [N], the first token, and the number of tokens, of the sequence that starts from the initial state.
      last_start, end: [N], the first token of the sequence that ends in the final state, and the token after its last
        token.
    """

    age: jax.Array | None
    left: jax.Array | None
    row: jax.Array
    start: jax.Array
    length: jax.Array
    last_start: jax.Array
    end: jax.Array


def _by_ids(ids: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return (age, left) of tokens: a sequence ends where the id [B, T] changes; ids below 0 are padding."""
    token, (start, final) = jnp.arange(ids.shape[1], dtype=jnp.int32)[None], segment_tables.runs(ids)
    hidden = lambda x: jnp.where(ids < 0, jnp.int32(-1), x)
    return hidden(token - start), hidden(final - token)


def _by_boundaries(T: int, start: jax.Array, end: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return (age, left) [1, T] of the tokens of sequences [start, end), whose boundaries rise."""
    # Every token is compared with every boundary, because a TPU is slow in searches, gathers and scans.
    token = jnp.arange(T, dtype=jnp.int32)[:, None]
    first = jnp.max(jnp.where(start[None] <= token, start[None], jnp.int32(0)), axis=1)
    past = jnp.min(jnp.where(end[None] > token, end[None], jnp.int32(T)), axis=1)
    token = token[:, 0]
    hidden = lambda x: jnp.where(token < end[-1], x, jnp.int32(-1))[None]
    return hidden(token - first), hidden(past - jnp.int32(1) - token)


def find(B: int, T: int, cu_seqlens: jax.Array | None, segment_ids: jax.Array | None) -> RowSequences:
    """Return the sequences of a batch of B rows of T tokens."""
    rows, zeros, whole = jnp.arange(B, dtype=jnp.int32), jnp.zeros(B, jnp.int32), jnp.full(B, T, jnp.int32)
    if cu_seqlens is not None:
        start, end = cu_seqlens[:-1], cu_seqlens[1:]
        age, left = _by_boundaries(T, start, end)
        return RowSequences(age, left, jnp.zeros(start.shape, jnp.int32), start, end - start, start, end)
    if segment_ids is None:
        return RowSequences(None, None, rows, zeros, whole, zeros, whole)
    age, left = _by_ids(segment_ids)
    valid = segment_ids >= 0
    first = jnp.argmax(valid, axis=1).astype(jnp.int32)
    last = jnp.int32(T - 1) - jnp.argmax(valid[:, ::-1], axis=1).astype(jnp.int32)
    any_valid = jnp.any(valid, axis=1)
    at = lambda x, token: jnp.take_along_axis(x, token[:, None], axis=1)[:, 0]
    length = jnp.where(any_valid, at(left, first) + 1, 0)
    # A row of padding counts as a sequence without tokens, which leaves its state as it is.
    last_start = jnp.where(any_valid, last - at(age, last), first)
    return RowSequences(age, left, rows, first, length, last_start, jnp.where(any_valid, last + 1, first))
