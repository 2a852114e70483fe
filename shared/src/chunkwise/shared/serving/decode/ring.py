"""The mathematics of rings in decodes of n sequences: reads from rings, and the states after them.

Arrays in, arrays out. `state_pool` has the equations. The matrix unit reads a ring as the L H rows of its keys and the
L HV rows of its writes, in the order of the pool: value head n = h R + r is in row r H + h of a token. Rows of other
heads and of tokens that do not exist get the weight 0. No product mixes sequences, so NaN and infinity in one sequence
change no other sequence.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import tpu as pltpu

from chunkwise.shared.kernels import matmul, tiles
from chunkwise.shared.serving import ring_tile
from chunkwise.shared.serving.decode import tile


def existing(x: jax.Array, count, rows: int) -> jax.Array:
    """Return x with zeros for tokens that do not exist, whose rows may hold anything; a token has `rows` rows.

    Numbers of 16 bits are selected in pairs of rows, as words of 32 bits.
    """
    words = x if x.dtype.itemsize == 4 else pltpu.bitcast(x, jnp.uint32)
    row = lax.broadcasted_iota(jnp.int32, words.shape, 0)
    kept = jnp.where(row < count * jnp.int32(rows * len(words) // len(x)), words, jnp.zeros((), words.dtype))
    return kept if kept.dtype == x.dtype else pltpu.bitcast(kept, x.dtype)


def remaining(gates: list[jax.Array], HV: int) -> tuple[jax.Array, jax.Array]:
    """Return the decays of tokens and of states up to the ends of rings.

    Args:
      gates: for every sequence [L, rows], the gates of all heads once or several times; zeros for tokens that do not
        exist.
      HV: value heads.

    Returns:
      For tokens [n rows, L HV], and for states [n, rows].
    """
    L = len(gates[0])
    start = jnp.concatenate([jnp.sum(x, axis=0, keepdims=True) for x in gates])
    # Gates of -inf become finite, because -inf times 0 is NaN.
    rows = jnp.maximum(jnp.concatenate(gates, axis=1).T, jnp.finfo(jnp.float32).min)  # [n HV, L]
    token, column = (lax.broadcasted_iota(jnp.int32, (L, L * HV), axis) for axis in (0, 1))
    later = (token > lax.div(column, jnp.int32(HV))).astype(jnp.bfloat16)[None]
    return jnp.exp(ring_tile.product(in_parts(rows, jnp.float32), (later,))), jnp.exp(start)


def remaining_by_channel(gates: jax.Array, HV: int) -> tuple[jax.Array, jax.Array]:
    """Return the decays of the tokens of a ring up to its end, [L HV, K], and of its states, [HV, K].

    Args:
      gates: [L HV, K]; zeros for tokens that do not exist.
      HV: value heads.
    """
    later = lambda x, rows: jnp.concatenate([x[rows:], jnp.zeros_like(x[:rows])])
    since, rows = gates, HV
    while rows < len(gates):
        since, rows = since + later(since, rows), 2 * rows
    return jnp.exp(later(since, HV)), jnp.exp(since[:HV])


def decayed_keys(keys: jax.Array, gates: jax.Array, count, HV: int) -> tuple[jax.Array, jax.Array]:
    """Return the keys of a ring times their decays up to its end, float32 [L HV, K], and the decays of its states.

    Args:
      keys, gates: [L HV, K] of the ring, where every value head has a key.
      count: how many tokens the ring has.
      HV: value heads.
    """
    left, start = remaining_by_channel(existing(gates, count, HV), HV)
    return existing(keys, count, HV).astype(jnp.float32) * left, start


def score(
    rows: list[list[jax.Array]], keys: Sequence[tuple[jax.Array, ...]], counts: list[Any], HV: int
) -> jax.Array:  # fmt: skip
    """Return the products of keys and queries with the keys of rings, [m 2 HV, L H], sequence by sequence.

    Args:
      rows: for every sequence and each of its tokens, all parts of the keys and queries, [parts 2 HV, K].
      keys: for every ring, its keys in parts, [1, L H, K] each.
      counts: for every ring, the number of its tokens times the key heads.
      HV: value heads.
    """
    found = []
    for x, y, count in zip(rows, keys, counts, strict=True):
        starts = range(0, len(x[0]), 2 * HV)
        parts = tuple(
            jnp.concatenate([token[j : j + 2 * HV] for token in x]).astype(jnp.bfloat16)[None] for j in starts
        )  # fmt: skip
        scores = ring_tile.product(parts, y, matmul.dot_nt)
        # The keys of tokens that do not exist may hold anything.
        found.append(jnp.where(lax.broadcasted_iota(jnp.int32, scores.shape, 1) < count, scores, 0.0))
    return jnp.concatenate(found)


def weigh(scores: jax.Array, left: jax.Array | None, n: int, HV: int, dtype) -> list[tuple[jax.Array, ...]]:
    """Return the weights of writes for keys and queries of every sequence, in parts [1, 2 HV tokens, L HV].

    Args:
      scores: the result of `score`.
      left: [m 2 HV, L HV], the decays of `remaining` for tokens; None if every value head has its keys, decayed.
      n: sequences.
      HV: value heads.
      dtype: the type of the writes.
    """
    weights = scores
    if left is not None:
        # The score of a key goes to the columns of all its value heads.
        spread = _same_key(left.shape[1], scores.shape[1], HV)
        weights = ring_tile.product(in_parts(scores, dtype), (spread,), matmul.dot_nt) * left
    row, column = (lax.broadcasted_iota(jnp.int32, weights.shape, axis) for axis in (0, 1))
    same_head = lax.rem(row, jnp.int32(HV)) == lax.rem(column, jnp.int32(HV))
    parts = in_parts(jnp.where(same_head, weights, 0.0), dtype)
    rows = len(weights) // n
    return [tuple(x[:, i : i + rows] for x in parts) for i in range(0, len(weights), rows)]


def read(weights: tuple[jax.Array, ...], writes: jax.Array, count, HV: int) -> jax.Array:
    """Return the values that keys and queries read from a ring, [rows, V]: weighted sums of its writes [L HV, V]."""
    return ring_tile.product(weights, ring_tile.exact_parts(existing(writes, count, HV)[None], writes.dtype))


def _same_key(rows: int, keys: int, HV: int) -> jax.Array:
    """Return [1, L HV, L H] in bfloat16, 1 where the column's key belongs to the row's token and value head."""
    row, key = (lax.broadcasted_iota(jnp.int32, (rows, keys), axis) for axis in (0, 1))
    H = jnp.int32(keys * HV // rows)
    return (key == lax.div(row, jnp.int32(HV)) * H + lax.rem(row, H)).astype(jnp.bfloat16)[None]


def fold(
    states: list[jax.Array], scales: list[Any], keys: jax.Array, writes: jax.Array, gates: jax.Array, count
) -> list[tuple[jax.Array, jax.Array | None]]:
    """Return the states [K, V] of a slot after the tokens of its ring, in their type, and their scales.

    Args:
      states: the states of all value heads, in the order of the rows of a token.
      scales: the scales of the states, [1, K] each for int8, or else None.
      keys, writes: [L H, K] and [L HV, V] of the ring.
      gates: [L, HV] of the ring, or per channel [L HV, K].
      count: how many tokens the ring has.
    """
    HV = len(states)
    if gates.shape[1] == HV:
        keys, decays = _decayed_keys_of_heads(keys, gates, count, HV, len(writes))
    else:
        keys, start = decayed_keys(keys, gates, count, HV)
        decays = [start[h : h + 1] for h in range(HV)]
    head, writes = lax.rem(lax.broadcasted_iota(jnp.int32, writes.shape, 0), jnp.int32(HV)), existing(writes, count, HV)
    found = []
    for h, (S, decay, scale) in enumerate(zip(states, decays, scales, strict=True)):
        of_head = jnp.where(head == h, writes.astype(jnp.float32), 0.0)
        decay = decay if scale is None else decay * scale
        found.append(ring_tile.fold_head(S, keys, of_head, decay, writes.dtype))
    return found


def _decayed_keys_of_heads(keys, gates, count, HV: int, rows: int) -> tuple[jax.Array, list[jax.Array]]:
    """Return the decayed key for every row of writes, and the decay of every state, for gates per head."""
    left, start = remaining([existing(gates, count, 1)], HV)
    head, row = (lax.broadcasted_iota(jnp.int32, left.shape, axis) for axis in (0, 1))
    of_row = jnp.sum(jnp.where(head == lax.rem(row, jnp.int32(HV)), left, 0.0), axis=0, keepdims=True)
    keys = existing(keys, count, len(keys) * HV // rows)
    spread, parts = _same_key(rows, len(keys), HV), ring_tile.exact_parts(keys[None], keys.dtype)
    keys = functools.reduce(jnp.add, [matmul.dot(spread, x)[0] for x in parts])
    return keys * tiles.to_column(of_row[None])[0], [start[:, h : h + 1] for h in range(HV)]


def parts_of(dtype) -> int:
    """Return how many parts a factor beside a ring of this type has."""
    return tile.PARTS if dtype == jnp.float32 else tile.PARTS - 1


def in_parts(x: jax.Array, dtype) -> tuple[jax.Array, ...]:
    """Return x in parts for a product with this type, [1, rows, columns] each."""
    return tuple(y.astype(jnp.bfloat16)[None] for y in tile.exact_parts(x)[: parts_of(dtype)])
