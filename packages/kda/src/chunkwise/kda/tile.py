"""Tile mathematics of Kimi delta attention: arrays in, arrays out, shared by the kernels and the plain JAX form.

Tiles are [heads, C, D]; gates inside are to base 2, which is what the machine's exponential takes.

Pairs (i, j), i > j, of a chunk belong to the level b = 1, 2, ..., C/2 at which i is in the right and j in the left
half of one block of 2b rows. Between them lies the last row n of the left half, so their decay is the product of
e^(sum of g over (n, i]) and e^(sum of g over (j, n]): two exponents that are never positive. With these as factors of
the rows and of the columns a whole level is one matrix product, for any gate.
"""

import itertools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from chunkwise.shared import LOG2_E, dot_nt, last_valid, operand_dtype, to_column
from chunkwise.shared.packed import lanes, pack_members, parts, rotate, rows

# Rows of one vector register: blocks of so many rows are taken apart and put together for free.
SUBLANES = 8
# The least gate, to base 2, inside of base blocks of 8 rows. Four such gates leave 2^-96, so that with any gates the
# factors of one product are numbers; a decay below it counts as 2^-24 = 6e-8, which a bfloat16 row cannot tell from 0.
LEAST_GATE = -24.0


def base_block(gate_lower_bound: float | None, dtype) -> int:
    """Return the size of the diagonal blocks that one product anchored in the middle covers: 8 rows, or 1 for none.

    It is 8 where no gate is below `LEAST_GATE`, and for any gate if the tensors are bfloat16.
    """
    bounded = gate_lower_bound is not None and gate_lower_bound * LOG2_E >= LEAST_GATE
    return SUBLANES if bounded or operand_dtype(dtype) == jnp.bfloat16 else 1


def level_table(C: int, base: int) -> np.ndarray:
    """Return int32 [C, 2 C], which product holds the pair of column j and row i, of queries, then of keys; -1 for none.

    Product l is that of level b = 2^l, or for l = 0 that of the base blocks, which holds rows with themselves too.
    Without base blocks the product of a row with itself is none of them: log2 C.
    """
    j, i = np.arange(C)[:, None], np.arange(C)[None]
    level = np.floor(np.log2(np.where(i == j, C, i ^ j))).astype(np.int32)
    level = np.where((i ^ j) < base, 0, level) if base > 1 else level
    return np.concatenate([np.where(i >= j, level, -1), np.where(i > j, level, -1)], axis=1)


class Decays(NamedTuple):
    """Decays between rows of a chunk, all [h, C, K].

    Attributes:
      base: the factors of rows and of columns of base blocks, anchored in their middle; None if the base is 1.
      levels: per level b = base, 2 base, ..., C/2, in right halves over (n, i], in left halves over (j, n].
      start: from the start of the chunk to row i, its gate included.
      end: from row i to the end, its gate not included.
    """

    base: tuple[jax.Array, jax.Array] | None
    levels: list[jax.Array]
    start: jax.Array
    end: jax.Array


def join_blocks(start: list, end: list, total: list, join) -> list[list]:
    """Join neighbouring blocks of rows until one is left.

    Args:
      start, end: what is between the start of its block and a row, between the row and the end of the block.
      total: of whole blocks.
      join: of two such things, where one follows the other.

    Returns:
      Those of every level on the way, start and end, all cut like the arguments.
    """
    levels, n, b = [], len(start), 1
    while b < n:
        levels.append([start[i] if i & b else end[i] for i in range(n)])
        start, end = join_starts(start, total, b, join), join_ends(end, total, b, join)
        total = join_totals(total, join)
        b *= 2
    return [*levels, start, end]


def join_starts(start: list, total: list, b: int, join) -> list:
    """Return what is between the start of two joined blocks of b pieces and a row."""
    return [join(total[i // b - 1], x) if i & b else x for i, x in enumerate(start)]


def join_ends(end: list, total: list, b: int, join) -> list:
    """Return what is between a row and the end of two joined blocks of b pieces."""
    return [x if i & b else join(x, total[i // b + 1]) for i, x in enumerate(end)]


def join_totals(total: list, join) -> list:
    """Return what pairs of neighbouring blocks have in all."""
    return [join(*pair) for pair in zip(total[::2], total[1::2], strict=True)]


def middle_sums(g: list[jax.Array]) -> list[jax.Array]:
    """Return the sums from the middle of blocks of 8 rows to each row, given and returned row by row."""
    half = SUBLANES // 2
    g = [jnp.maximum(x, LEAST_GATE) for x in g]
    left = list(itertools.accumulate(g[half - 1 : 0 : -1], jnp.subtract, initial=jnp.zeros_like(g[0])))
    return left[::-1] + list(itertools.accumulate(g[half:]))


def block_decays(g: list[jax.Array], base: int) -> list[list[jax.Array]]:
    """Return the decays in blocks of 8 rows from gates to base 2, row by row.

    Sums of gates have one sign, so nothing cancels; None is the sum of no gate.
    """
    join = lambda x, y: y if x is None else x if y is None else x + y
    sums = join_blocks(g, [None] * len(g), g, join)
    if base > 1:
        middle = middle_sums(g)
        sums[:-2] = [middle, [-x for x in middle]]
    return [[jnp.ones_like(g[0]) if x is None else jnp.exp2(x) for x in each] for each in sums]


def cut_rows(x: jax.Array) -> list[jax.Array]:
    """Return x [h, C, K] in pieces of 8 rows."""
    return [x[:, i : i + SUBLANES] for i in range(0, x.shape[1], SUBLANES)]


def block_totals(start: jax.Array) -> list[jax.Array]:
    """Return the decay over every block of 8 rows, in all rows of a register [h, 8, K]."""
    return [jnp.broadcast_to(x[:, SUBLANES - 1 :], x.shape) for x in cut_rows(start)]


def chunk_decays(blocks, base: int) -> Decays:
    """Return all decays of a chunk from its `block_decays`, each [h, C, K]: decays in a row are multiplied."""
    *inside, start, end = blocks
    joined = join_blocks(cut_rows(start), cut_rows(end), block_totals(start), jnp.multiply)
    *levels, start, end = map(rows, joined)
    if base == 1:
        return Decays(None, inside + levels, start, end)
    return Decays((inside[0], inside[1]), levels, start, end)


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


def level_factors(x: Decays):
    """Yield the factors of every product, as `Level`; both halves of a chunk's rows have those of the row."""
    C = x.start.shape[1]
    if x.base is not None:
        for_rows, for_columns = x.base
        yield Level(0, None, for_columns, twice(for_rows))
    for n, e in enumerate(x.levels):
        index = C.bit_length() - 1 - len(x.levels) + n
        b = 1 << index
        if b < SUBLANES:
            yield Level(index, None, e, twice(e))
        else:
            left, right = halves(e, b)
            yield Level(index, b, left, twice(right))


class Decayed(NamedTuple):
    """Queries and keys with the decay between their row and a boundary of the chunk, all [h, C, K].

    Attributes:
      q_start, k_start: from the start of the chunk to the row, its gate included.
      k_end: from the row to the end.
      through: [h, 1, K], the decay over the whole chunk.
    """

    q_start: jax.Array
    k_start: jax.Array
    k_end: jax.Array
    through: jax.Array


def interaction_tile(q, k, blocks, table, base: int, dtype, pairs: bool = False) -> tuple[jax.Array, Decayed]:
    """Return the decayed products of queries and keys with keys, transposed, and what passes the chunk's boundaries.

    Queries and keys carry the decay of their block along while blocks are joined: at level b they are the rows and the
    columns of the product, at last they belong to the whole chunk.

    Args:
      q, k: [h, C, K] float32.
      blocks: `block_decays`, each [h, C, K].
      table: `level_table` [1, C, 2 C], for the same base.
      base: rows of the diagonal blocks that one product covers.
      dtype: of the operands of the products. The columns keep 16 bits: the rounding of a row is the same for all its
        columns, it acts like another query or key, and no sum of new values amplifies it; that of a column differs
        from row to row of the sum.
      pairs: whether two heads share the products of large levels: the time of a product goes with what stands still in
        the matrix unit, all rows, while a level needs the right halves only. Those of an odd head take the place of the
        left halves of the even one.

    Returns:
      [h, C, 2 C] float32: for key j <q_i, e^(G_i - G_j) k_j>, i >= j, beside <k_i, e^(G_i - G_j) k_j>, i > j.
    """
    h, C, operand = k.shape[0], k.shape[1], operand_dtype(dtype)
    *inside, start, end = blocks
    both, out = rows([q, k]), jnp.zeros((h, C, 2 * C), jnp.float32)
    if base == 1:
        out = jnp.where(table == C.bit_length() - 1, jnp.sum(q * k, axis=-1, keepdims=True), out)
    for index, (for_rows, for_columns) in enumerate(zip(inside, inside, strict=True) if base == 1 else [inside]):
        # Columns of level 1 have no decay: they are the keys, which are exact.
        own = (k.astype(operand),) if (index, base) == (0, 1) else parts(k * for_columns, dtype)
        decayed = (both * twice(for_rows)).astype(operand)
        out = jnp.where(table == index, dot_nt(lanes(own), lanes([decayed] * len(own))), out)

    q_start, k_start, k_end, total = cut_rows(q * start), cut_rows(k * start), cut_rows(k * end), block_totals(start)
    n, b = C // SUBLANES, 1
    while b < n:
        # Only left halves have pairs as columns, right halves as rows; taking whole registers apart is free.
        size = b * SUBLANES
        own = lanes(parts(rows([x for i, x in enumerate(k_end) if not i & b]), dtype))
        decayed = rows([x for pieces in (q_start, k_start) for i, x in enumerate(pieces) if i & b])
        even, odd = pack_members(decayed, 2) if pairs else (decayed, decayed)
        if b == 1:
            decayed = join_halves(odd, even, size).astype(operand)
        else:
            decayed = join_halves(odd.astype(operand), even.astype(operand), size)
        decayed = lanes([decayed] * (own.shape[2] // decayed.shape[2]))
        if pairs:
            product = dot_nt(rows(pack_members(own, 2)), decayed)
            product = rows([product[:, : C // 2], rotate(product[:, C // 2 :], size)]).reshape(h, C // 2, 2 * C)
        else:
            product = dot_nt(own, decayed)
        (here, _), (left, right) = halves(table, size), halves(out, size)
        out = join_halves(jnp.where(here == size.bit_length() - 1, product, left), right, size)

        q_start, k_start = (join_starts(x, total, b, jnp.multiply) for x in (q_start, k_start))
        k_end = join_ends(k_end, total, b, jnp.multiply)
        total = join_totals(total, jnp.multiply)
        b *= 2
    return out, Decayed(rows(q_start), rows(k_start), rows(k_end), total[0][:, :1])


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


def within_sequence(carried: list, ending: list, through: jax.Array, masks: Masks | None):
    """Return what passes the boundaries of a chunk, zero where it belongs to another sequence.

    Args:
      carried: tiles [h, C, K] that meet the state before the chunk.
      ending: those that meet the state after it.
      through: [h, 1, K], the decay over the chunk.
      masks: of a chunk that holds several sequences, or None.
    """
    if masks is None:
        return *carried, *ending, through
    carried = [jnp.where(masks.carried, x, 0.0) for x in carried]
    return *carried, *(jnp.where(masks.ending, x, 0.0) for x in ending), jnp.where(masks.through, through, 0.0)


def packed_pairs(same: jax.Array, p: int) -> jax.Array:
    """Return `Masks.same` for queries above keys, p heads side by side, [1, 2 C, p C]; a kernel cannot join masks."""
    return twice(lanes([jnp.where(same, 1.0, 0.0)] * p)) > 0.0
