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

from chunkwise.shared.kernels import matmul, packed, tiles
from chunkwise.shared.serving.decode import tile

# How many rows a register of bfloat16 numbers has.
_ROWS = 16


def existing(x: jax.Array, count, rows: int) -> jax.Array:
    """Return x with zeros for tokens that do not exist, whose rows may hold anything; a token has `rows` rows.

    Numbers of 16 bits are selected in pairs of rows, as words of 32 bits, where a token has whole pairs.
    """
    if rows * x.dtype.itemsize % 4:
        return existing(x.astype(jnp.float32), count, rows).astype(x.dtype)
    words = x if x.dtype.itemsize == 4 else pltpu.bitcast(x, jnp.uint32)
    row = lax.broadcasted_iota(jnp.int32, words.shape, 0)
    kept = jnp.where(row < count * jnp.int32(rows * len(words) // len(x)), words, jnp.zeros((), words.dtype))
    return kept if kept.dtype == x.dtype else pltpu.bitcast(kept, x.dtype)


def blocks(H: int, HV: int) -> list[range]:
    """Return the rows of a token that one product takes: registers of bfloat16 numbers, or else all rows."""
    size = _ROWS if HV % _ROWS == 0 and (H % _ROWS == 0 or _ROWS % H == 0) else HV
    return [range(first, first + size) for first in range(0, HV, size)]


def _of_block(x: jax.Array, block: range, rows: int) -> jax.Array:
    """Return the rows of a block out of each `rows` rows of x."""
    if len(block) == rows:
        return x
    return jnp.concatenate([x[at + block[0] : at + block[-1] + 1] for at in range(0, len(x), rows)])


def remaining(gates: list[jax.Array], B: int) -> tuple[jax.Array, jax.Array]:
    """Return the decays of tokens and of states up to the ends of rings.

    Args:
      gates: for every sequence [L, HV]; zeros for tokens that do not exist.
      B: how many columns of the result a token has.

    Returns:
      For tokens [n HV, L B], and for states [n, HV].
    """
    L = len(gates[0])
    start = jnp.concatenate([jnp.sum(x, axis=0, keepdims=True) for x in gates])
    # Gates of -inf become finite, because -inf times 0 is NaN.
    rows = jnp.maximum(jnp.concatenate(gates, axis=1).T, jnp.finfo(jnp.float32).min)  # [n HV, L]
    token, column = (lax.broadcasted_iota(jnp.int32, (L, L * B), axis) for axis in (0, 1))
    later = (token > lax.div(column, jnp.int32(B))).astype(jnp.bfloat16)[None]
    return jnp.exp(product(in_parts(rows, jnp.float32), (later,))), jnp.exp(start)


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
      keys, gates: [L H, K] and [L HV, K] of the ring.
      count: how many tokens the ring has.
      HV: value heads.
    """
    left, start = remaining_by_channel(existing(gates, count, HV), HV)
    H = len(keys) * HV // len(gates)
    keys = existing(keys, count, H).astype(jnp.float32)
    if H < HV:
        keys = jnp.concatenate([keys[at : at + H] for at in range(0, len(keys), H) for _ in range(HV // H)])
    return keys * left, start


def score(
    rows: list[list[jax.Array]], keys: Sequence[jax.Array], counts: list[Any], block: range, H: int, HV: int, dtype
) -> jax.Array:  # fmt: skip
    """Return the products of keys and queries of a block with its keys of rings, [m 2 B, L keys], by sequences.

    Args:
      rows: for every sequence and each of its tokens, all parts of the keys and queries, [parts 2 HV, K].
      keys: the keys of every ring, [L H, K], in the type of the ring, or decayed in float32.
      counts: how many tokens every ring has.
      block: the rows of the block.
      H, HV: key heads and value heads.
      dtype: the type of the ring.
    """
    found, first = [], block[0] % H
    of_keys = range(first, first + min(len(block), H))
    for x, y, count in zip(rows, keys, counts, strict=True):
        starts = range(0, len(x[0]), 2 * HV)
        parts = tuple(
            jnp.concatenate([_of_block(token[j : j + 2 * HV], block, HV) for token in x]).astype(jnp.bfloat16)[None]
            for j in starts
        )  # fmt: skip
        y = _of_block(y, of_keys, H)
        y = in_parts(y, dtype) if y.dtype != dtype else stored_parts(y[None], dtype)
        scores = product(parts, y, matmul.dot_nt)
        # The keys of tokens that do not exist may hold anything.
        exists = lax.broadcasted_iota(jnp.int32, scores.shape, 1) < count * jnp.int32(len(of_keys))
        found.append(jnp.where(exists, scores, 0.0))
    return jnp.concatenate(found)


def ring_weights(scores: jax.Array, left: jax.Array | None, n: int, B: int, dtype) -> list[tuple[jax.Array, ...]]:
    """Return the weights of writes for keys and queries of every sequence, in parts [1, 2 B tokens, L B].

    Args:
      scores: the result of `score`.
      left: [m 2 B, L B], the decays of `remaining` for tokens; None if every value head has its keys, decayed.
      n: sequences.
      B: the rows of the block.
      dtype: the type of the writes.
    """
    weights = scores
    if left is not None:
        if left.shape != scores.shape:
            # The score of a key goes to the columns of all its value heads.
            spread = _same_key(left.shape[1], scores.shape[1], B)
            weights = product(in_parts(scores, dtype), (spread,), matmul.dot_nt)
        weights = weights * left
    row, column = (lax.broadcasted_iota(jnp.int32, weights.shape, axis) for axis in (0, 1))
    same_head = lax.rem(row, jnp.int32(B)) == lax.rem(column, jnp.int32(B))
    parts = in_parts(jnp.where(same_head, weights, 0.0), dtype)
    rows = len(weights) // n
    return [tuple(x[:, i : i + rows] for x in parts) for i in range(0, len(weights), rows)]


def read(weights: tuple[jax.Array, ...], writes: jax.Array, count, block: range, HV: int) -> jax.Array:
    """Return the values that keys and queries of a block read from a ring: weighted sums of its writes [L HV, V]."""
    writes = existing(_of_block(writes, block, HV), count, len(block))
    return product(weights, stored_parts(writes[None], writes.dtype))


def _same_key(rows: int, keys: int, HV: int) -> jax.Array:
    """Return [1, L HV, L H] in bfloat16, 1 where the column's key belongs to the row's token and value head."""
    row, key = (lax.broadcasted_iota(jnp.int32, (rows, keys), axis) for axis in (0, 1))
    H = jnp.int32(keys * HV // rows)
    return (key == lax.div(row, jnp.int32(HV)) * H + lax.rem(row, H)).astype(jnp.bfloat16)[None]


def fold_tokens(keys: jax.Array, writes: jax.Array, gates: jax.Array, count, HV: int) -> tuple[jax.Array, ...]:
    """Return what a fold adds to the states of a slot, in the order of the rows of a token.

    Args:
      keys, writes: [L H, K] and [L HV, V] of the ring.
      gates: [L, HV] of the ring, or per channel [L HV, K].
      count: how many tokens the ring has.
      HV: value heads.

    Returns:
      The decayed key and the write of every row, float32 [L HV, K] and [L HV, V], and the decay of every state, [HV, 1]
      or [HV, K].
    """
    if gates.shape == (len(writes) // HV, HV):
        keys, decay = _decayed_keys_of_heads(keys, gates, count, HV, len(writes))
    else:
        keys, decay = decayed_keys(keys, gates, count, HV)
    return keys, existing(writes, count, HV).astype(jnp.float32), decay


def _decayed_keys_of_heads(keys, gates, count, HV: int, rows: int) -> tuple[jax.Array, jax.Array]:
    """Return the decayed key for every row of writes, and the decay of every state, for gates per head."""
    left, start = remaining([existing(gates, count, 1)], HV)
    head, row = (lax.broadcasted_iota(jnp.int32, left.shape, axis) for axis in (0, 1))
    of_row = jnp.sum(jnp.where(head == lax.rem(row, jnp.int32(HV)), left, 0.0), axis=0, keepdims=True)
    keys = existing(keys, count, len(keys) * HV // rows)
    spread, parts = _same_key(rows, len(keys), HV), stored_parts(keys[None], keys.dtype)
    keys = functools.reduce(jnp.add, [matmul.dot(spread, x)[0] for x in parts])
    return keys * tiles.to_column(of_row[None])[0], tiles.to_column(start[None])[0]


def apply_ring(
    state: jax.Array, keys: jax.Array, writes: jax.Array, decay: jax.Array, ring_dtype
) -> tuple[jax.Array, jax.Array | None]:
    """Return the state [K, V] after its ring, in the type of the pool, and its scales [1, K], None unless it is int8.

    Args:
      state: the state of a head, in the type of the pool.
      keys, writes, decay: the results of `fold_tokens` for the head, [L, K], [L, V], and [1, K] or [1, 1]; the decay is
        already multiplied by the scales of the state.
      ring_dtype: the type of the writes in the ring.
    """
    column = decay if decay.shape[1] == 1 else tiles.to_column(decay[None])[0]
    # All parts of keys and writes that are multiplied are stacked, for one product.
    left, right = matmul.bf16_parts(keys[None], parts_of(ring_dtype)), stored_parts(writes[None], ring_dtype)
    pairs = [(i, j) for j in range(len(right)) for i in range(len(left) - j)]
    left, right = (packed.concat_rows(x) for x in ([left[i] for i, _ in pairs], [right[j] for _, j in pairs]))
    return tile.stored(column * state.astype(jnp.float32) + matmul.dot_tn(left, right, jnp.bfloat16)[0], state.dtype)


def parts_of(dtype) -> int:
    """Return how many parts a factor beside a ring of this type has."""
    return tile.PARTS if dtype == jnp.float32 else tile.PARTS - 1


def in_parts(x: jax.Array, dtype) -> tuple[jax.Array, ...]:
    """Return x in parts for a product with this type, [1, rows, columns] each."""
    return tuple(y.astype(jnp.bfloat16)[None] for y in tile.exact_parts(x)[: parts_of(dtype)])


def stored_parts(x: jax.Array, dtype) -> tuple[jax.Array, ...]:
    """Return x, which holds numbers of this type, as bfloat16 parts with the sum x: one part for int8 and bfloat16."""
    return matmul.bf16_parts(x) if dtype == jnp.float32 else (x.astype(jnp.bfloat16),)


def product(left: tuple[jax.Array, ...], right: tuple[jax.Array, ...], dot=matmul.dot) -> jax.Array:
    """Return the product [m, n] of matrices [1, m, k] and [1, k, n] in parts, without products of two small parts.

    The parts of the left factor that are multiplied by one part of the right factor are stacked. `dot` may take a
    transposed factor.
    """
    products, m = [], left[0].shape[1]
    for j, part in enumerate(right):
        some = left[: len(left) - j]
        y = dot(packed.concat_rows(some), part, jnp.bfloat16)[0]
        products += [y[i * m : (i + 1) * m] for i in range(len(some))]
    return functools.reduce(jnp.add, products[::-1])
