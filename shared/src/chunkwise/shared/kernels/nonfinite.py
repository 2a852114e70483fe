"""Keeping what is not finite in one sequence of a chunk away from the other sequences of that chunk.

A mask that multiplies does not keep sequences apart: 0 times NaN is NaN, and a product reads every row of its operands.
So a chunk that holds several sequences does this, and other chunks cost nothing:

1. Find the rows that hold something not finite (`rows_not_finite`), and whether the state that comes in does
   (`not_finite`): the state belongs to the sequence that is open where the chunk begins, its gradient to the one that
   is open where the chunk ends.
2. Extend these rows to their whole sequences inside the chunk (`whole_sequences`).
3. Select zeros for these rows, and for such a state, before any product.
4. Store NaN in the results of these rows, and in the state that goes out if it belongs to such a sequence (`spoil`),
   so that nothing is hidden.

Padding counts to the sequence before it here, because the state passes through it. A kernel does 1 and 2 inside of
`only_if`, where the table of steps says that the chunk is mixed. A chunk that begins with a new sequence is mixed too:
it must not read the state. So is one with padding, whose rows would make NaN of a state that is not finite.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from chunkwise.shared.kernels import tiles

# Bits of a float32: all but the sign, and those of an infinity, above which there are only NaNs.
_SIZE, _INFINITY = 0x7FFFFFFF, 0x7F800000


def _sizes(x: jax.Array) -> jax.Array:
    """Return the bits of |x| as int32, which are ordered like |x|, NaNs last."""
    return lax.bitcast_convert_type(x.astype(jnp.float32), jnp.int32) & jnp.int32(_SIZE)


def _largest(x: jax.Array) -> jax.Array:
    """Return the largest of the tiles [heads, m, w], entry by entry, [1, m, w]."""
    return functools.reduce(jnp.maximum, [x[i : i + 1] for i in range(x.shape[0])])


def rows_not_finite(*tiles: jax.Array) -> jax.Array:
    """Return which rows hold a NaN or an infinity in any of the tiles [heads, C, w], as 1 and 0: float32 [1, C, 1]."""
    found = []
    for tile in tiles:
        # [1, C, w]; integers have no reduction over lanes on every generation, so they become 1 and 0 first.
        size = _largest(_sizes(tile))
        found.append(jnp.where(size >= jnp.int32(_INFINITY), jnp.float32(1.0), jnp.float32(0.0)))
        found[-1] = jnp.max(found[-1], axis=2, keepdims=True)
    return functools.reduce(jnp.maximum, found)


def not_finite(state: jax.Array) -> jax.Array:
    """Return whether a state [heads, K, V] holds a NaN or an infinity, as 1 or 0: float32 [1, 1, 1]."""
    return jnp.max(rows_not_finite(state), axis=1, keepdims=True)


def whole_sequences(found: jax.Array, same: jax.Array) -> jax.Array:
    """Return which rows belong to a sequence of which a row is found.

    Args:
      found: float32 [1, C, 1], 1 and 0.
      same: bool [1, C, C], pairs of rows of one sequence.
    """
    return jnp.max(jnp.where(same, tiles.to_row(found), 0.0), axis=2, keepdims=True)


def masked_or_not(mixed: jax.Array | None, run: Callable[[bool | None], None]) -> None:
    """Run a turn with masks where a chunk of it is mixed, and without them elsewhere, where they would only cost time.

    Args:
      mixed: bool scalar, or None if a chunk of this launch is never mixed.
      run: gets True, False, or None for never.
    """
    if mixed is None:
        run(None)
    else:
        pl.when(mixed)(lambda: run(True))
        pl.when(jnp.logical_not(mixed))(lambda: run(False))


def only_if(condition: jax.Array, find: Callable[[], jax.Array], C: int) -> jax.Array:
    """Return find(), float32 [1, C, 1], if the scalar condition holds, else zeros and compute nothing."""
    return lax.cond(condition, find, lambda: jnp.zeros((1, C, 1), jnp.float32))


def spoil(ref, found: jax.Array) -> None:
    """Store NaN in the rows of a block [C, w] that are found, float32 [1, C, 1]."""
    ref[...] = jnp.where(found[0] > 0.0, jnp.full(ref.shape, jnp.nan, ref.dtype), ref[...])
