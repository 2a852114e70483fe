"""Tile mathematics of Kimi delta attention: arrays in, arrays out, shared by the kernels and the plain JAX form.

Tiles are [heads, C, D]; gates inside are to base 2, which is what the machine's exponential takes.

Pairs (i, j), i > j, of a chunk belong to the level b = 1, 2, ..., C/2 at which i is in the right and j in the left
half of one block of 2b rows. Between them lies the last row n of the left half, so their decay is the product of
e^(sum of g over (n, i]) and e^(sum of g over (j, n]): two exponents that are never positive. With these as factors of
the rows and of the columns a whole level is one matrix product, for any gate.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from chunkwise.shared import dot_nt, last_valid, operand_dtype, to_column
from chunkwise.shared.packed import lanes, parts, rows

# Exponents of a base block that is anchored in its middle stay below this: e^40 squared is far inside float32.
_SAFE_EXPONENT = 40.0
# Rows of one vector register: blocks of so many rows are taken apart and put together for free.
SUBLANES = 8


def base_block(C: int, gate_lower_bound: float | None) -> int:
    """Return the size of the diagonal blocks that one product anchored in the middle covers; 1 without a bound."""
    if gate_lower_bound is None:
        return 1
    size = 1
    while 2 * size <= C and size * -gate_lower_bound <= _SAFE_EXPONENT:
        size *= 2
    return size


def level_table(C: int, base: int) -> np.ndarray:
    """Return int32 [C, 2 C], which product holds the pair of column j and row i, of queries, then of keys; -1 for none.

    Product l is that of level b = 2^l, or for l = 0 that of the base blocks. The last row of a left half has no decay
    in it as a row or as a column, so there its own query and key stand; those of row C - 1 do in none: log2 C.
    """
    j, i = np.arange(C)[:, None], np.arange(C)[None]
    level = np.frompyfunc(lambda x: x.bit_length() - 1, 1, 1)(i ^ j).astype(np.int32)
    own = np.frompyfunc(lambda x: (~x & (x + 1)).bit_length() - 1, 1, 1)(i + 0 * j).astype(np.int32)
    level = np.where(i == j, own, level)
    level = np.where((i ^ j) < base, 0, level) if base > 1 else level
    return np.concatenate([np.where(i >= j, level, -1), np.where(i > j, level, -1)], axis=1)


class Sums(NamedTuple):
    """Sums of the gate over the chunk, to base 2, all of one sign, so that nothing cancels.

    Attributes:
      levels: per level b = 1, 2, ..., C/2 [h, C, K]: in right halves the sum over (n, i], in left halves over (j, n].
      prefix: [h, C, K], the sum from the first row to i, both included.
      suffix: [h, C, K], the sum over the rows after i.
    """

    levels: list[jax.Array]
    prefix: jax.Array
    suffix: jax.Array


def join_sums(prefix: list[jax.Array], suffix: list[jax.Array], total) -> tuple[list, list, list]:
    """Join neighbouring blocks of rows until one is left; `total` takes the sum of a block from its prefix.

    Returns:
      The sums of every level on the way, the prefixes and the suffixes, all cut like the arguments.
    """
    levels, n, b = [], len(prefix), 1
    while b < n:
        levels.append([prefix[i] if i & b else suffix[i] for i in range(n)])
        lefts = [total(prefix[(i & -2 * b) + b - 1]) if i & b else 0.0 for i in range(n)]
        rights = [0.0 if i & b else total(prefix[i | (2 * b - 1)]) for i in range(n)]
        prefix = [x + y if i & b else x for i, (x, y) in enumerate(zip(prefix, lefts, strict=True))]
        suffix = [x if i & b else x + y for i, (x, y) in enumerate(zip(suffix, rights, strict=True))]
        b *= 2
    return levels, prefix, suffix


def block_sums(g: list[jax.Array]) -> list[list[jax.Array]]:
    """Return the sums of levels 2 and 4, prefix and suffix of blocks of 8 rows, given and returned row by row."""
    (_, two, four), prefix, suffix = join_sums(g, [jnp.zeros_like(x) for x in g], lambda x: x)
    return [two, four, prefix, suffix]


def chunk_sums(g, two, four, prefix, suffix) -> Sums:
    """Return all sums of a chunk from the gate to base 2 and its `block_sums`, all [h, C, K]."""
    C = g.shape[1]
    odd = (lax.broadcasted_iota(jnp.int32, (1, C, 1), 1) & 1) != 0
    cut = [[x[:, i : i + SUBLANES] for i in range(0, C, SUBLANES)] for x in (prefix, suffix)]
    levels, prefix, suffix = join_sums(*cut, lambda x: x[:, SUBLANES - 1 :])
    return Sums([jnp.where(odd, g, 0.0), two, four, *map(rows, levels)], rows(prefix), rows(suffix))


def middle_exponent(levels, base: int) -> jax.Array:
    """Return the sums from the middle of every block of `base` rows to each row: negative after it, positive before."""
    d = levels[base.bit_length() - 2]
    after = (lax.broadcasted_iota(jnp.int32, d.shape, 1) & (base // 2)) != 0
    return jnp.where(after, d, -d)


def twice(x: jax.Array) -> jax.Array:
    """Return x above x: the same for the rows of queries and of keys."""
    return rows([x, x])


def halves(x, b):
    """Return the rows of left and of right halves of every 2b rows of x [h, R, D], each [h, R / 2, D]."""
    h, R, D = x.shape
    x = x.reshape(h, R // (2 * b), 2, b, D)
    return x[:, :, 0].reshape(h, R // 2, D), x[:, :, 1].reshape(h, R // 2, D)


def join_halves(left, right, b):
    """Return [h, R, D] from the rows of left and of right halves; the inverse of `halves`."""
    h, R, D = left.shape
    both = [x.reshape(h, R // b, b, D) for x in (left, right)]
    return jnp.stack(both, axis=2).reshape(h, 2 * R, D)


class Level(NamedTuple):
    """One of the products that make up the interaction.

    Attributes:
      index: in `level_table`.
      b: rows of a half of its blocks where these are whole registers, else None: then all rows and columns take part.
      columns: float32 [h, C, K] or, with b, those of left halves [h, C / 2, K]: the factors of keys as columns.
      rows: float32 [h, 2 C, K] or, with b, those of right halves [h, C, K]: of queries, then of keys as rows.
    """

    index: int
    b: int | None
    columns: jax.Array
    rows: jax.Array


def level_factors(levels, base: int):
    """Yield the factors of every product, as `Level`; both halves of a chunk's rows have those of the row."""
    if base > 1:
        d = middle_exponent(levels, base)
        yield Level(0, None, jnp.exp2(-d), twice(jnp.exp2(d)))
    for index in range(base.bit_length() - 1, len(levels)):
        b, e = 1 << index, jnp.exp2(levels[index])
        if b < SUBLANES:
            yield Level(index, None, e, twice(e))
        else:
            left, right = halves(e, b)
            yield Level(index, b, left, twice(right))


def interaction_tile(q, k, levels, table, base, dtype):
    """Return the decayed products of queries and keys with keys, transposed.

    Args:
      q, k: [h, C, K] float32.
      levels: the sums of the gate per level.
      table: `level_table` [1, C, 2 C].
      base: rows of the diagonal blocks that one product covers; 1 for any gate.
      dtype: of the operands of the products. The columns keep 16 bits: the rounding of a row is the same for all its
        columns, it acts like another query or key, and no sum of new values amplifies it; that of a column differs
        from row to row of the sum.

    Returns:
      [h, C, 2 C] float32: for key j <q_i, e^(G_i - G_j) k_j>, i >= j, beside <k_i, e^(G_i - G_j) k_j>, i > j.
    """
    C, operand = k.shape[1], operand_dtype(dtype)
    both = rows([q, k])
    raw = both.astype(operand)
    last = jnp.sum(q[:, C - 1 :] * k[:, C - 1 :], axis=-1, keepdims=True)
    out = jnp.where(table == C.bit_length() - 1, last, 0.0)
    for x in level_factors(levels, base):
        if x.b is None:
            # Columns of level 1 have no decay: they are the keys, which are exact.
            own = (k.astype(operand),) if (x.index, base) == (0, 1) else parts(k * x.columns, dtype)
            decayed = (both * x.rows).astype(operand)
            product = dot_nt(lanes(own), lanes([decayed] * len(own)))
            out = jnp.where(table == x.index, product, out)
            continue
        # Only left halves have pairs as columns, right halves as rows; taking whole registers apart is free.
        own = parts(halves(k, x.b)[0] * x.columns, dtype)
        decayed = halves(both, x.b)[1] * x.rows
        if x.b == SUBLANES:
            decayed = join_halves(halves(both, x.b)[0], decayed, x.b).astype(operand)
        else:
            decayed = join_halves(halves(raw, x.b)[0], decayed.astype(operand), x.b)
        product = dot_nt(lanes(own), lanes([decayed] * len(own)))
        left, right = halves(out, x.b)
        out = join_halves(jnp.where(halves(table, x.b)[0] == x.index, product, left), right, x.b)
    return out


class Masks(NamedTuple):
    """Which rows of a chunk that holds several sequences belong together.

    Attributes:
      same: [1, C, C], rows of one sequence.
      carried, ending: [1, C, 1], rows of the sequence that is open where the chunk begins and ends.
      through: [1, 1, 1], the chunk lies inside one sequence.
      valid: [1, C, 1], rows of any sequence; None where the caller masks its rows itself.
    """

    same: jax.Array
    carried: jax.Array
    ending: jax.Array
    through: jax.Array
    valid: Any


def stream_tile(owner, opening, sequences) -> Masks:
    """Return the masks of a chunk from the sequence of every row [1, 1, C] and the one that is open before it."""
    row = owner.astype(jnp.float32)
    col, last = to_column(row), last_valid(row)
    opening = opening.astype(jnp.float32)
    return Masks(col == row, col == opening, col == last, last == opening, col < sequences)


def boundary_tile(sums: Sums, masks: Masks | None):
    """Return the decays to the boundaries of the chunk.

    Returns:
      from_start [h, C, K], from the start of the chunk to each row, zero for rows of later sequences.
      to_end [h, C, K], from each row to the end, zero for rows of sequences that ended.
      through [h, 1, K], over the whole chunk, zero if a sequence ends in it.
    """
    C = sums.prefix.shape[1]
    from_start, to_end = jnp.exp2(sums.prefix), jnp.exp2(sums.suffix)
    through = from_start[:, C - 1 :]
    if masks is not None:
        from_start, to_end = jnp.where(masks.carried, from_start, 0.0), jnp.where(masks.ending, to_end, 0.0)
        through = jnp.where(masks.through, through, 0.0)
    return from_start, to_end, through


def packed_pairs(same: jax.Array, p: int) -> jax.Array:
    """Return `Masks.same` for queries above keys, p heads side by side, [1, 2 C, p C]; a kernel cannot join masks."""
    return twice(lanes([jnp.where(same, 1.0, 0.0)] * p)) > 0.0
