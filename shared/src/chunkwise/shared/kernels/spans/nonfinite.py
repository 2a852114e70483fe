"""Keeping NaN and infinity in one sequence of a chunk away from the other sequences of that chunk.

A mask that multiplies does not keep sequences apart: 0 times NaN is NaN, and a product reads every row of its operands.
So the body of a chunk that holds several sequences stands between two calls, and other chunks cost nothing:

1. `isolate` finds the rows that hold something not finite, and whether the state that comes in does. (The state belongs
   to the sequence that is open where the chunk begins, and in a backward its gradient to the sequence that is open
   where the chunk ends.) It clears such a state, and extends the rows to their whole sequences, so that no product
   reads a row of them.
2. `poison` stores NaN in the results of these sequences, and in the state that goes out if it belongs to one of them,
   so that nothing is hidden.

Padding counts as a part of the sequence before it here, because the state passes through it. Two kinds of chunks with
one sequence are treated as mixed, too: a chunk that begins with a new sequence, because it must not read the state, and
a chunk with padding, whose results must stay zeros beside a state that is not finite.
"""

import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from chunkwise.shared.kernels import tiles
from chunkwise.shared.kernels.spans import layout

# Bits of a float32: all but the sign, and the bits of infinity; larger numbers of bits are NaNs.
_SIZE, _INFINITY = 0x7FFFFFFF, 0x7F800000


def _sizes(x: jax.Array) -> jax.Array:
    """Return the bits of |x| as int32, which are ordered like |x|, NaNs last."""
    return lax.bitcast_convert_type(x.astype(jnp.float32), jnp.int32) & jnp.int32(_SIZE)


def _largest(x: jax.Array) -> jax.Array:
    """Return the largest of the tiles [heads, m, w], entry by entry, [1, m, w]."""
    return functools.reduce(jnp.maximum, [x[i : i + 1] for i in range(x.shape[0])])


def rows_not_finite(*tiles: jax.Array) -> jax.Array:
    """Return which rows hold a NaN or an infinity in any of the tiles [heads, C, w], as 1 and 0: float32 [1, C, 1]."""
    nonfinite_rows = []
    for tile in tiles:
        # [1, C, w]; integers have no reduction over lanes on every generation, so they become 1 and 0 first.
        size = _largest(_sizes(tile))
        flags = jnp.where(size >= jnp.int32(_INFINITY), jnp.float32(1.0), jnp.float32(0.0))
        nonfinite_rows.append(jnp.max(flags, axis=2, keepdims=True))
    return functools.reduce(jnp.maximum, nonfinite_rows)


def not_finite(state: jax.Array) -> jax.Array:
    """Return whether a state [heads, K, V] holds a NaN or an infinity, as 1 or 0: float32 [1, 1, 1]."""
    return jnp.max(rows_not_finite(state), axis=1, keepdims=True)


def whole_sequences(nonfinite_rows: jax.Array, same: jax.Array) -> jax.Array:
    """Return which rows belong to a sequence that has a row which is not finite.

    Args:
      nonfinite_rows: float32 [1, C, 1], 1 and 0.
      same: bool [1, C, C], pairs of rows of one sequence.
    """
    return jnp.max(jnp.where(same, tiles.to_row(nonfinite_rows), 0.0), axis=2, keepdims=True)


def only_if(condition: jax.Array, find: Callable[[], jax.Array], C: int) -> jax.Array:
    """Return find(), float32 [1, C, 1], if the scalar condition holds; otherwise return zeros without a computation."""
    return lax.cond(condition, find, lambda: jnp.zeros((1, C, 1), jnp.float32))


def isolate(
    masks: layout.SequenceMasks, find: Callable[[], jax.Array], *states: tuple, mixed: jax.Array | None = None
) -> tuple[jax.Array, jax.Array]:
    """Find the sequences of a chunk that are not finite, and clear a state of one of them.

    Args:
      masks: how the sequences lie in the chunk.
      find: returns which rows are not finite, float32 [1, C, 1]; rows of padding may be among them.
      *states: tuples of the Ref of a state [heads, ...] that comes in, the rows of its sequence, bool [1, C, 1], and
        the part of a head to search, which is all of it if none is given.
      mixed: bool scalar, False where the search can be left out; None to search always.

    Returns:
      The rows that the chunk may read, bool [C, 1]; and the rows of sequences that are not finite, float32 [1, C, 1].
    """
    valid = masks.code >= 0

    def search() -> jax.Array:
        nonfinite_rows = jnp.where(valid, find(), 0.0)
        for ref, owned, *part in states:
            state = not_finite(ref[:, *part])  # [1, 1, 1]
            pl.when(jnp.max(state) > 0.0)(functools.partial(layout.clear, ref))
            nonfinite_rows = jnp.maximum(nonfinite_rows, jnp.where(owned, state, 0.0))
        return whole_sequences(nonfinite_rows, masks.same[:, :, : valid.shape[1]])

    nonfinite_rows = search() if mixed is None else only_if(mixed, search, valid.shape[1])
    return (valid & (nonfinite_rows == 0.0))[0], nonfinite_rows


def poison(
    nonfinite_rows: jax.Array, masks: layout.SequenceMasks, results: Sequence, *states: tuple, in_lanes: Sequence = ()
) -> None:
    """Store NaN in the results of the sequences that `isolate` found; a Ref may be None.

    Args:
      nonfinite_rows, masks: the rows that `isolate` found, and its masks.
      results: Refs of tokens [C, w].
      *states: tuples of the Ref of a state that goes out, and the rows of its sequence, bool [1, C, 1].
      in_lanes: Refs of values per token [heads, C] or [heads, 1, C].
    """

    @pl.when(jnp.max(nonfinite_rows) > 0.0)
    def _():
        tokens = jnp.where(masks.code >= 0, nonfinite_rows, 0.0)
        for ref in results:
            _store_nan(ref, tokens[0] > 0.0)
        for ref in in_lanes:
            if ref is not None:
                row = tiles.to_row(tokens) > 0.0  # [1, 1, C]
                _store_nan(ref, row[0] if len(ref.shape) == 2 else row)
        for ref, owned in states:
            owner = jnp.max(jnp.where(owned, nonfinite_rows, 0.0))
            pl.when(owner > 0.0)(functools.partial(_store_nan, ref, True))


def take_state(
    S: jax.Array, nonfinite_rows: jax.Array, owned: jax.Array, part: slice = slice(None)
) -> tuple[jax.Array, jax.Array]:
    """Return a state [heads, ...] without what is not finite, and the rows of sequences that are not finite with its.

    It does what `isolate` does for the Ref of a state, without a branch.

    Args:
      S: the state that comes in.
      nonfinite_rows: float32 [1, C, 1], the rows that `isolate` found.
      owned: bool [1, C, 1], the rows of its sequence.
      part: the rows of a head to search, if a whole column is not finite where one of its numbers is not.
    """
    flags = jnp.where(_sizes(S[:, part]) >= jnp.int32(_INFINITY), jnp.float32(1.0), jnp.float32(0.0))
    flags = flags if part == slice(None) else jnp.max(flags, axis=1, keepdims=True)
    spoilt = jnp.max(jnp.max(_largest(flags), axis=1, keepdims=True), axis=2, keepdims=True)  # [1, 1, 1]
    return jnp.where(flags > 0.0, jnp.zeros_like(S), S), jnp.maximum(nonfinite_rows, jnp.where(owned, spoilt, 0.0))


def give_state(decay: jax.Array, nonfinite_rows: jax.Array, owned: jax.Array) -> jax.Array:
    """Return the decay of a state to the state that goes out; NaN if its sequence, with the rows `owned`, is spoilt."""
    spoilt = jnp.max(jnp.where(owned, nonfinite_rows, 0.0), axis=1, keepdims=True)  # [1, 1, 1]
    return jnp.where(spoilt > 0.0, jnp.full_like(decay, jnp.nan), decay)


def _store_nan(ref, where) -> None:
    if ref is not None:
        ref[...] = jnp.where(where, jnp.full(ref.shape, jnp.nan, ref.dtype), ref[...])
