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

from chunkwise.shared.kernels import layout, matmul, packed, tiles

# Rows of one vector register: blocks of so many rows are taken apart and put together for free.
SUBLANES = 8
# The least gate, to base 2, inside of base blocks of 8 rows. Four such gates leave 2^-96, so that with any gates the
# factors of one product are numbers; a decay below it counts as 2^-24 = 6e-8, which a bfloat16 row cannot tell from 0.
# A decay that is 0 must stay 0, whatever was stored before: a chunk that has one takes no base blocks.
LEAST_GATE = -24.0
# A gate in nats whose decay is no normal number of float32, and counts as 0.
ZERO_DECAY = -87.0


def base_block(min_gate: float | None, dtype) -> int:
    """Return the size of the diagonal blocks that one product anchored in the middle covers: 8 rows, or 1 for none.

    It is 8 where no gate is below `LEAST_GATE`, and for any gate if the tensors are bfloat16.
    """
    bounded = min_gate is not None and min_gate * tiles.LOG2_E >= LEAST_GATE
    return SUBLANES if bounded or matmul.operand_dtype(dtype) == jnp.bfloat16 else 1


def count_decays(base: int) -> int:
    """Return how many lists `block_decays` gives for this base."""
    return {0: 2, 1: 5}.get(base, 4)


def level_table(C: int, base: int) -> np.ndarray:
    """Return int32 [C, 2 C], which product holds the pair of column j and row i, of queries, then of keys; -1 for none.

    Product l belongs to level b = 2^l, or for l = 0 to the base blocks, which hold rows with themselves too.
    Without base blocks the product of a row with itself is none of them: log2 C.
    """
    j, i = np.arange(C)[:, None], np.arange(C)[None]
    level = np.floor(np.log2(np.where(i == j, C, i ^ j))).astype(np.int32)
    level = np.where((i ^ j) < base, 0, level) if base > 1 else level
    return np.concatenate([np.where(i >= j, level, -1), np.where(i > j, level, -1)], axis=1)


class ChannelDecays(NamedTuple):
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


def join_blocks(start: list, end: list, join, total) -> list[list]:
    """Join neighbouring blocks of rows until one is left.

    Args:
      start, end: what is between the start of its block and a row, between the row and the end of the block.
      join: of two such things, where one follows the other.
      total: of a block, from the last of its `start`.

    Returns:
      Those of every level on the way, start and end, all cut like the arguments.
    """
    levels, n, b = [], len(start), 1
    while b < n:
        levels.append([start[i] if i & b else end[i] for i in range(n)])
        totals = [total(start[i | (b - 1)]) for i in range(n)]
        start = [join(totals[i ^ b], x) if i & b else x for i, x in enumerate(start)]
        end = [x if i & b else join(x, totals[i ^ b]) for i, x in enumerate(end)]
        b *= 2
    return [*levels, start, end]


def middle_sums(g: list[jax.Array], continuing: list[jax.Array] | None) -> list[jax.Array]:
    """Return the sums from the middle of blocks of 8 rows to each row, given and returned row by row.

    Args:
      g: the gates.
      continuing: 1 for a row of the same sequence as the row before it, else 0; None if all are. A sum counts the gates
        of the sequence of its row only, so that no sequence changes the rounding of another.
    """
    half = SUBLANES // 2
    g = [jnp.maximum(x, LEAST_GATE) for x in g]
    sums = [jnp.zeros_like(g[0]), g[half]]  # of the two rows beside the middle
    for row in range(half - 1, 0, -1):
        x = sums[0] - g[row]
        sums.insert(0, x if continuing is None else x * continuing[row])
    for row in range(half + 1, SUBLANES):
        x = sums[-1] if continuing is None else sums[-1] * continuing[row]
        sums.append(x + g[row])
    return sums


def block_decays(g: list[jax.Array], base: int, continuing: list[jax.Array] | None = None) -> list[list[jax.Array]]:
    """Return the decays in blocks of 8 rows from gates to base 2, row by row; `continuing` as in `middle_sums`.

    Sums of gates have one sign, so nothing cancels; None is the sum of no gate. A base of 0 asks for the decays from
    the start and to the end of blocks alone.
    """
    join = lambda x, y: y if x is None else x if y is None else x + y
    sums = join_blocks(g, [None] * len(g), join, lambda x: x)
    if base == 0:
        sums = sums[-2:]
    elif base > 1:
        middle = middle_sums(g, continuing)
        sums[:-2] = [middle, [-x for x in middle]]
    return [[jnp.ones_like(g[0]) if x is None else jnp.exp2(x) for x in each] for each in sums]


def chunk_decays(blocks, base: int) -> ChannelDecays:
    """Return all decays of a chunk from its `block_decays`, each [h, C, K]: decays in a row are multiplied.

    With a base of 0 these are no decays between rows.
    """
    *inside, start, end = blocks
    cut = [[x[:, i : i + SUBLANES] for i in range(0, start.shape[1], SUBLANES)] for x in (start, end)]
    *levels, start, end = map(packed.concat_rows, join_blocks(*cut, jnp.multiply, lambda x: x[:, SUBLANES - 1 :]))
    if base <= 1:
        return ChannelDecays(None, inside + levels if base else [], start, end)
    return ChannelDecays((inside[0], inside[1]), levels, start, end)


def twice(x: jax.Array) -> jax.Array:
    """Return x above x: the same for the rows of queries and of keys."""
    return packed.concat_rows([x, x])


def halves(x, b):
    """Return the rows of left and of right halves of every 2b rows of x [h, R, D], each [h, R / 2, D]."""
    h, R, D = x.shape
    x = x.reshape(h, R // (2 * b), 2, b, D)
    return x[:, :, 0].reshape(h, R // 2, D), x[:, :, 1].reshape(h, R // 2, D)


def join_halves(left, right, b):
    """Return [h, R, D] from the rows of left and of right halves; the inverse of `halves`."""
    h, R, D = left.shape
    blocks = [x.reshape(h, R // b, b, D) for x in (left, right)]  # each [h, R / b, b, D]
    return jnp.stack(blocks, axis=2).reshape(h, 2 * R, D)


def level_factors(x: ChannelDecays):
    """Yield the factors of every product that makes up the interaction; both halves of a row have its factors.

    Yields:
      Its index in `level_table`; b, the rows of a half of its blocks where these are whole registers, else None: then
      all rows and columns take part; the factors of keys as columns, float32 [h, C, K] or, with b, of left halves
      [h, C / 2, K]; and of queries, then of keys as rows, [h, 2 C, K] or, with b, of right halves [h, C, K].
    """
    C = x.start.shape[1]
    for n, e in enumerate(x.levels):
        index = C.bit_length() - 1 - len(x.levels) + n
        b = 1 << index
        if b < SUBLANES:
            yield index, None, e, twice(e)
        else:
            left, right = halves(e, b)
            yield index, b, left, twice(right)
    if x.base is not None:
        for_rows, for_columns = x.base
        yield 0, None, for_columns, twice(for_rows)


def interaction_tile(q, e, k, decays: ChannelDecays, table, dtype, pairs: bool = False) -> jax.Array:
    """Return the decayed products of queries and erase keys with keys, transposed.

    Args:
      q, e, k: [h, C, K] float32; e is k where what is erased is read by k.
      decays: between the rows.
      table: `level_table` [1, C, 2 C], for the base of the decays.
      dtype: of the operands of the products. The columns keep 16 bits: the rounding of a row is the same for all its
        columns, it acts like another query or key, and no sum of new values amplifies it; the rounding of a column
        differs from row to row of the sum.
      pairs: whether two heads share the products of large levels: the time of a product goes with what stands still in
        the matrix unit, all rows, while a level needs the right halves only. Those of an odd head take the place of the
        left halves of the even one.

    Returns:
      [h, C, 2 C] float32: for key j <q_i, e^(G_i - G_j) k_j>, i >= j, beside <e_i, e^(G_i - G_j) k_j>, i > j.
    """
    h, C, operand = k.shape[0], k.shape[1], matmul.operand_dtype(dtype)
    stacked = packed.concat_rows([q, e])  # [h, 2 C, K]
    out = jnp.zeros((h, C, 2 * C), jnp.float32)  # [h, C, 2 C]
    if decays.base is None:
        # No product holds a row with itself, which has no decay.
        itself = jnp.sum(q * k, axis=-1, keepdims=True)  # [h, C, 1]
        out = jnp.where(table == C.bit_length() - 1, itself, out)  # [h, C, 2 C]
    for index, b, by_column, by_row in level_factors(decays):
        if b is None:
            # Blocks of fewer rows than a register has: all rows and columns take part, and the table selects.
            columns = packed.split_bf16(k * by_column, dtype)  # each [h, C, K]
            decayed = (stacked * by_row).astype(operand)  # [h, 2 C, K]
            product = matmul.dot_nt(
                packed.concat_lanes(columns), packed.concat_lanes([decayed] * len(columns))
            )  # [h, C, 2 C]
            out = jnp.where(table == index, product, out)  # [h, C, 2 C]
            continue
        # Only left halves have pairs as columns, right halves as rows; taking whole registers apart is free.
        columns = packed.concat_lanes(packed.split_bf16(halves(k, b)[0] * by_column, dtype))  # [h, C / 2, parts K]
        decayed = halves(stacked, b)[1] * by_row  # [h, C, K]
        even, odd = packed.pack_members(decayed, 2) if pairs else (decayed, decayed)  # each [h / 2, C, K], or [h, C, K]
        if b == SUBLANES:  # half a register of bfloat16: joined before it is rounded
            decayed = join_halves(odd, even, b).astype(operand)  # [h / 2, 2 C, K], or [h, 2 C, K]
        else:
            decayed = join_halves(odd.astype(operand), even.astype(operand), b)  # as above
        decayed = packed.concat_lanes([decayed] * (columns.shape[2] // decayed.shape[2]))  # [.., 2 C, parts K]
        if pairs:
            # The columns of both heads of a pair lie below one another and meet the rows of both: the pairs of the odd
            # one stand a block beside their place.
            product = matmul.dot_nt(packed.concat_rows(packed.pack_members(columns, 2)), decayed)  # [h / 2, C, 2 C]
            product = packed.concat_rows(
                [product[:, : C // 2], packed.rotate(product[:, C // 2 :], b)]
            )  # [h / 2, C, 2 C]
            product = product.reshape(h, C // 2, 2 * C)  # [h, C / 2, 2 C]
        else:
            product = matmul.dot_nt(columns, decayed)  # [h, C / 2, 2 C]
        left, right = halves(out, b)  # each [h, C / 2, 2 C]
        chosen = jnp.where(halves(table, b)[0] == index, product, left)  # [h, C / 2, 2 C]
        out = join_halves(chosen, right, b)  # [h, C, 2 C]
    return out


def within_sequence(carried: list, ending: list, through: jax.Array, masks: Any):
    """Return what passes the boundaries of a chunk, zero where it belongs to another sequence.

    Args:
      carried: tiles [h, C, K] that meet the state before the chunk.
      ending: those that meet the state after it.
      through: [h, 1, K], the decay over the chunk.
      masks: of a chunk that holds several sequences, with carried, ending and through as `SequenceMasks`, or None.
    """
    if masks is None:
        return *carried, *ending, through
    carried = [jnp.where(masks.carried, x, 0.0) for x in carried]
    return *carried, *(jnp.where(masks.ending, x, 0.0) for x in ending), jnp.where(masks.through, through, 0.0)


def boundary_tile(decays: ChannelDecays, masks: layout.SequenceMasks | None):
    """Return the decays from the start of a chunk, to its end and through it, within one sequence."""
    return within_sequence([decays.start], [decays.end], decays.start[:, -1:], masks)


def continuing(same: jax.Array) -> jax.Array:
    """Return 1 for rows of the sequence of the row before, else 0, [n, C, 1], from `SequenceMasks.same` [n, C, C]."""
    C = same.shape[1]
    before = tiles.row_index(C) == tiles.column_index(C) + jnp.int32(1)
    return jnp.sum((before & same).astype(jnp.float32), axis=2, keepdims=True)


def packed_pairs(same: jax.Array, p: int) -> jax.Array:
    """Return `SequenceMasks.same` [1, C, C] for queries above keys, p heads side by side, [1, 2 C, p C].

    A kernel cannot join masks, so numbers are joined.
    """
    return twice(packed.concat_lanes([same.astype(jnp.float32)] * p)) > 0.0


def transposed(x):
    """Return the matrices [p, C, R] of a pack transposed and side by side, [1, R, p C]."""
    p, C, R = x.shape
    return jnp.swapaxes(x.reshape(p * C, R), 0, 1)[None]


def pack_scores(q, e, k, decays: ChannelDecays, levels, masks: layout.SequenceMasks | None, dtype) -> jax.Array:
    """Return the packed scores of queries above the scores of erase keys, [1, 2 C, p C], of a pack of heads.

    Args:
      q, e, k: [p, C, K] float32, q scaled.
      decays: between the rows of the chunk.
      levels: `level_table`.
      masks: of a chunk that holds several sequences, or None.
      dtype: of the operands of the products.
    """
    interaction = interaction_tile(q, e, k, decays, levels[None], dtype, pairs=len(q) % 2 == 0)  # [p, C, 2 C]
    scores = transposed(interaction)  # [1, 2 C, p C]
    return scores if masks is None else jnp.where(packed_pairs(masks.same, len(q)), scores, 0.0)


def pack_boundary(readers, k, beta, decays: ChannelDecays, masks: layout.SequenceMasks | None):
    """Return what the state needs of the rows of a chunk, of a pack of heads.

    Args:
      readers: [q, e] or [e], each [p, C, K] float32, q scaled.
      k: [p, C, K] float32.
      beta: [p, C, 1].
      decays, masks: as in `pack_scores`.

    Returns:
      The rows that read the state before the chunk, decayed from its start: queries, if any, above erase keys, [p, 2 C
      or C, K]; the keys times beta, decayed to its end [p, C, K]; the decay over all of it [p, 1, K].
    """
    from_start, to_end, through = boundary_tile(decays, masks)  # [p, C, K], [p, C, K], [p, 1, K]
    readers_decayed = packed.concat_rows(readers) * packed.concat_rows([from_start] * len(readers))
    return readers_decayed, (k * beta) * to_end, through


def read_state(readers, S):
    """Return the product of readers [heads, R, K] and the transposed S [heads, V, K], [heads, R, V] float32."""
    heads, V, K = S.shape
    # Two heads fill the 256 x 256 weights of a matrix unit.
    p = 2 if heads % 2 == 0 and 2 * K <= 256 and 2 * V <= 256 else 1
    S = packed.place_tiles(packed.pack_members(S.astype(readers.dtype), p), p)  # [heads / p, p V, p K]
    return packed.split_lanes(matmul.dot_nt(packed.side_lanes(readers, p), S), p)


def write_state(v_new_over_beta, ends):
    """Return v_new_over_beta^T ends, [heads, V, K] float32, for `split_bf16` of both."""
    left, right = packed.part_pairs(v_new_over_beta, ends)
    return matmul.dot_tn(packed.concat_rows(left), packed.concat_rows(right))
