"""Where sequences begin and end in the rows of a batch: for recipes in which a token reads its neighbour."""

import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from chunkwise.shared.call import checks
from chunkwise.shared.kernels import chunking
from chunkwise.shared.kernels.spans import row_sequences

# The tokens that an exported program scans at once if it leaves their number open.
_CHUNK = 64


class Neighbours(NamedTuple):
    """The tokens of a batch of rows, of a packed batch, or of rows with segments.

    Attributes:
      first, last: bool [1 or B, T], the first and the last token of every sequence or segment.
      valid: bool [1 or B, T], False for padding; None if there can be no padding.
      rows, starts, stops: int32 [N], the row, the first token and the end of the tokens of every state.
    """

    first: jax.Array
    last: jax.Array
    valid: jax.Array | None
    rows: jax.Array
    starts: jax.Array
    stops: jax.Array

    def select(self, y: jax.Array) -> jax.Array:
        """Return y [B, T, ...] with zeros in padding, which may hold anything."""
        return chunking.select_tokens(self.valid, y)

    def before(self, y: jax.Array) -> jax.Array:
        """Return y [B, T, ...] of the token before each, zeros for a first token."""
        moved = jnp.pad(y[:, :-1], [(0, 0), (1, 0)] + [(0, 0)] * (y.ndim - 2))
        return chunking.select_tokens(~self.first, moved)

    def after(self, y: jax.Array) -> jax.Array:
        """Return y [B, T, ...] of the token after each, zeros for a last token."""
        moved = jnp.pad(y[:, 1:], [(0, 0), (0, 1)] + [(0, 0)] * (y.ndim - 2))
        return chunking.select_tokens(~self.last, moved)

    def at_start(self, y: jax.Array) -> jax.Array:
        """Return y [B, T, ...] of the first token of every state, [N, ...], zeros for a state without tokens."""
        return self._of_states(y[self.rows, self.starts], 0.0)

    def at_end(self, y: jax.Array, none: Any) -> jax.Array:
        """Return y [B, T, ...] of the last token of every state, [N, ...], and `none` for a state without tokens."""
        return self._of_states(y[self.rows, self.stops - 1], none)

    def _of_states(self, y: jax.Array, none: Any) -> jax.Array:
        return jnp.where(jnp.expand_dims(self.stops > self.starts, range(1, y.ndim)), y, none)

    def accumulate(self, decay: jax.Array, step: jax.Array, initial: jax.Array | None, fold=lambda y: y) -> jax.Array:
        """Return y_t = fold(decay_t y_{t-1} + step_t), [B, T, ...], from an initial y [N, ...], or from zeros.

        The arrays are float32 [B, T, ...], and zeros in padding. What `fold` takes away must not change a later y.
        """
        if initial is not None:
            step = step.at[self.rows, self.starts].add(self.at_start(decay) * initial)
        first = jnp.broadcast_to(self.first.reshape(-1, step.shape[1], *(1,) * (step.ndim - 2)), step.shape)

        def join(earlier, later):
            (begins, scale, y), (begins_later, scale_later, y_later) = earlier, later
            # Nothing of what was before a first token remains, a NaN neither.
            scale, y = (jnp.where(begins_later, jnp.zeros((), z.dtype), z) for z in (scale, y))
            return begins | begins_later, scale_later * scale, fold(scale_later * y + y_later)

        elements = first, jnp.broadcast_to(decay, step.shape), fold(step)
        scan, T = functools.partial(lax.associative_scan, join, axis=1), step.shape[1]
        if isinstance(T, int):
            return scan(elements)[2]
        # An exported program may leave the number of tokens open: some of them are scanned after the others.
        NT = chunking.num_chunks(T, _CHUNK)
        cut = lambda y: jnp.moveaxis(chunking.pad_tokens(y, NT * _CHUNK).reshape(-1, NT, _CHUNK, *y.shape[2:]), 1, 0)
        chunks = tuple(map(cut, elements))

        def move_on(carried, chunk):
            done = join(carried, scan(chunk))
            return tuple(y[:, -1:] for y in done), done[2]

        done = lax.scan(move_on, tuple(jnp.zeros_like(y[0, :, :1]) for y in chunks), chunks)[1]
        return jnp.moveaxis(done, 0, 1).reshape(-1, NT * _CHUNK, *step.shape[2:])[:, :T]


def find(sizes: Mapping[str, int], named: Mapping[str, Any]) -> Neighbours:
    """Return the sequences of the arguments of a call by name, whose boundaries or ids are checked here."""
    B, T, cu_seqlens, segment_ids = sizes["B"], sizes["T"], named["cu_seqlens"], named.get("segment_ids")
    checks.check_cu_seqlens(cu_seqlens, B, T)
    checks.check_segment_ids(segment_ids, B, T, cu_seqlens)
    if cu_seqlens is not None:
        cu_seqlens = chunking.rising(jnp.asarray(cu_seqlens, jnp.int32), T)
    s = row_sequences.find(B, T, cu_seqlens, None if segment_ids is None else jnp.asarray(segment_ids, jnp.int32))
    token = jnp.arange(T, dtype=jnp.int32)[None]
    age, left = (token, token[:, ::-1]) if s.age is None or s.left is None else (s.age, s.left)
    starts = jnp.where(s.length > 0, s.start, T)
    return Neighbours(age == 0, left == 0, None if s.age is None else age >= 0, s.row, starts, s.end)
