"""What rings add to decodes of one token of some sequences: what tokens read of them, and the states after them.

Arrays in, arrays out. `state_pool` has the equations. The matrix unit reads a ring as the L H rows of its keys and the
L HV rows of its writes, in the order of the pool: value head n = h R + r is in row r H + h of a token. Rows of other
heads and of tokens that do not exist get no weight. Sequences meet in no product, so that what is not finite in one
leaves the others.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import tpu as pltpu

from chunkwise.shared.kernels import matmul, tiles
from chunkwise.shared.serving import mixer_tile, ring_tile


def existing(x: jax.Array, count, rows: int) -> jax.Array:
    """Return x with zeros for tokens that do not exist, which may hold anything; each has so many rows, 32 bits each.

    Numbers of 16 bits are taken in pairs of rows.
    """
    words = x if x.dtype.itemsize == 4 else pltpu.bitcast(x, jnp.uint32)
    row = lax.broadcasted_iota(jnp.int32, words.shape, 0)
    kept = jnp.where(row < count * jnp.int32(rows * len(words) // len(x)), words, jnp.zeros((), words.dtype))
    return kept if kept.dtype == x.dtype else pltpu.bitcast(kept, x.dtype)


def remaining(gates: list[jax.Array], HV: int) -> tuple[jax.Array, jax.Array]:
    """Return what is left of tokens and of states at the ends of rings.

    Args:
      gates: [L, rows] of every sequence, of all heads once or several times; zeros for tokens that do not exist.
      HV: heads.

    Returns:
      [n rows, L HV], and [n, rows].
    """
    L = len(gates[0])
    start = jnp.concatenate([jnp.sum(x, axis=0, keepdims=True) for x in gates])
    # A product with a zero must be zero.
    rows = jnp.maximum(jnp.concatenate(gates, axis=1).T, jnp.finfo(jnp.float32).min)  # [n HV, L]
    token, column = (lax.broadcasted_iota(jnp.int32, (L, L * HV), axis) for axis in (0, 1))
    later = (token > lax.div(column, jnp.int32(HV))).astype(jnp.bfloat16)[None]
    return jnp.exp(ring_tile.product(_parts(rows, jnp.float32), (later,))), jnp.exp(start)


def score(rows: list[jax.Array], keys: Sequence[jax.Array], counts: list[Any], HV: int) -> jax.Array:
    """Return the products of keys and queries with the keys of rings, [n 2 HV, L H].

    Args:
      rows: parts of keys and queries of every sequence below one another, [parts 2 HV, K].
      keys: [L H, K] of every ring.
      counts: tokens of the rings, times the key heads.
      HV: value heads.
    """
    dtype, found = keys[0].dtype, []
    for x, y, count in zip(rows, keys, counts, strict=True):
        parts = tuple(x[j : j + 2 * HV].astype(jnp.bfloat16)[None] for j in range(0, len(x), 2 * HV))
        scores = ring_tile.product(parts, ring_tile.exact_parts(y[None], dtype), matmul.dot_nt)
        # The keys of tokens that do not exist may hold anything.
        found.append(jnp.where(lax.broadcasted_iota(jnp.int32, scores.shape, 1) < count, scores, 0.0))
    return jnp.concatenate(found)


def weigh(scores: jax.Array, left: jax.Array, HV: int, dtype) -> list[tuple[jax.Array, ...]]:
    """Return the weights of writes for keys and queries of every sequence, in parts [1, 2 HV, L HV].

    Args:
      scores: of `score`.
      left: [n 2 HV, L HV], of `remaining`.
      HV: value heads.
      dtype: of the writes.
    """
    # Each score of a key in the columns of all of its value heads.
    spread = _same_key(left.shape[1], scores.shape[1], HV)
    weights = ring_tile.product(_parts(scores, dtype), (spread,), matmul.dot_nt) * left
    row, column = (lax.broadcasted_iota(jnp.int32, weights.shape, axis) for axis in (0, 1))
    same_head = lax.rem(row, jnp.int32(HV)) == lax.rem(column, jnp.int32(HV))
    parts = _parts(jnp.where(same_head, weights, 0.0), dtype)
    return [tuple(x[:, i : i + 2 * HV] for x in parts) for i in range(0, len(left), 2 * HV)]


def read(weights: tuple[jax.Array, ...], writes: jax.Array, count) -> jax.Array:
    """Return what keys and queries read of a ring, [2 HV, V], of its writes [L HV, V] by their weights."""
    HV = weights[0].shape[1] // 2
    return ring_tile.product(weights, ring_tile.exact_parts(existing(writes, count, HV)[None], writes.dtype))


def _same_key(rows: int, keys: int, HV: int) -> jax.Array:
    """Return [1, L HV, L H] in bfloat16, ones where the row of a value head meets the row of its key."""
    row, key = (lax.broadcasted_iota(jnp.int32, (rows, keys), axis) for axis in (0, 1))
    H = jnp.int32(keys * HV // rows)
    return (key == lax.div(row, jnp.int32(HV)) * H + lax.rem(row, H)).astype(jnp.bfloat16)[None]


def fold(states: list[jax.Array], keys: jax.Array, writes: jax.Array, gates: jax.Array, count) -> list[jax.Array]:
    """Return the states [K, V] of a slot after the tokens of its ring, in their type.

    Args:
      states: of every value head, in the order of the rows of a token.
      keys, writes: [L H, K] and [L HV, V] of the ring.
      gates: [L, HV] of the ring.
      count: tokens of the ring.
    """
    HV, rows = len(states), len(writes)
    left, start = remaining([existing(gates, count, 1)], HV)
    head, row = (lax.broadcasted_iota(jnp.int32, left.shape, axis) for axis in (0, 1))
    of_row = jnp.sum(jnp.where(head == lax.rem(row, jnp.int32(HV)), left, 0.0), axis=0, keepdims=True)
    # A key for every row of writes, times what is left of it.
    keys = existing(keys, count, len(keys) * HV // rows)
    spread, parts = _same_key(rows, len(keys), HV), ring_tile.exact_parts(keys[None], keys.dtype)
    keys = functools.reduce(jnp.add, [matmul.dot(spread, x)[0] for x in parts])
    keys = keys * tiles.to_column(of_row[None])[0]
    head, writes = lax.rem(lax.broadcasted_iota(jnp.int32, writes.shape, 0), jnp.int32(HV)), existing(writes, count, HV)
    found = []
    for h, S in enumerate(states):
        of_head = jnp.where(head == h, writes.astype(jnp.float32), 0.0)
        found.append(ring_tile.fold_head(S, keys, of_head, start[:, h : h + 1], writes.dtype)[0])
    return found


def parts_of(dtype) -> int:
    """Return how many parts a number has that meets a ring of this type."""
    return mixer_tile.PARTS if dtype == jnp.float32 else mixer_tile.PARTS - 1


def _parts(x: jax.Array, dtype) -> tuple[jax.Array, ...]:
    """Return x in parts for a product, [1, rows, columns] each."""
    return tuple(y.astype(jnp.bfloat16)[None] for y in mixer_tile.exact_parts(x)[: parts_of(dtype)])
