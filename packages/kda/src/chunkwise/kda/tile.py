"""Tile mathematics of Kimi delta attention: arrays in, arrays out, shared by the kernels and the plain JAX form.

Tiles are [heads, C, D], with zeros in lanes behind the channels. In a kernel a tile may hold several narrow heads side
by side, see shared.kernels.spans.lanes. Gates are to base 2 here, because the machine's exponential is 2^x.

Pairs (i, j), i > j, of a chunk belong to the level b = 1, 2, ..., C/2 at which i is in the right and j in the left
half of one block of 2b rows. The last row n of the left half is between them, so their decay is the product of e^(sum
of g over (n, i]) and e^(sum of g over (j, n]), and neither exponent is ever positive. With these as factors of rows and
of columns, a whole level is one matrix product, for any gates.

Erase keys that read the state before the decay of their token have sums over (n, i - 1] as rows, without their own
gate: these are the sums of the row before. So a pair of neighbouring rows has no decay, as a row with itself.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from chunkwise.shared.kernels import matmul, packed, tiles
from chunkwise.shared.kernels.spans import lanes, layout

# Rows of a vector register: to take blocks of so many rows apart, or to join them, costs nothing.
SUBLANES = 8
# Of a pair of rows in a base block, the row's factor is 2^72 times the decay from the first row of the block, and the
# column's factor is 2^-72 times the inverse of such a decay. If no gate is below 2^-24, seven gates take these factors
# to 2^-96 and 2^96 at most.
ANCHOR = 2.0**72
# The least gate, to base 2, that a promise may allow so that base blocks are right for all rows.
LEAST_GATE = -24.0
# A row whose factor is below this for any channel goes by levels: the inverse of the factor may overflow.
LEAST_FACTOR = 2.0**-96
# In a backward whose gates have no bound the factors of a first row are 2^48 and 2^-48, and no factor is beyond these,
# so that products of small gradients do not underflow. Where the factor of a row would be less, the pairs of the row go
# by levels, for this channel alone: no sum of a backward is over channels.
NEAR_ANCHOR = 2.0**48


def base_block(min_gate: float | None, dtype) -> int:
    """Return the rows of base blocks, which are diagonal blocks covered by one product: 8, or 1 for no base blocks.

    It is 8 where no gate is below `LEAST_GATE`. It is also 8 if the tensors are bfloat16: rows after stronger gates
    are then computed once more, by levels.
    """
    bounded = min_gate is not None and min_gate * tiles.LOG2_E >= LEAST_GATE
    return SUBLANES if bounded or matmul.operand_dtype(dtype) == jnp.bfloat16 else 1


def count_decays(base: int, erase_before_decay: bool = False) -> int:
    """Return how many lists `block_decays` gives for these arguments."""
    return {0: 2, 1: 5}.get(base, 4) + erase_before_decay * len(_row_blocks(base))


def _row_blocks(base: int) -> list[int]:
    """Return the rows of the blocks, within 8 rows, at whose starts decays of rows begin: for every list of them."""
    return [*{0: [], 1: [1, 2, 4]}.get(base, [SUBLANES]), SUBLANES]


def level_table(C: int, base: int) -> np.ndarray:
    """Return int32 [C, 2 C], the product that has the pair of key j and query i, then of key j and key i; -1 for none.

    Product l is for level b = 2^l; product 0 is for the base blocks, if there are any, which also have the pairs of a
    row with itself. Without base blocks these pairs have the number log2 C, which is no product.
    """
    j, i = np.arange(C)[:, None], np.arange(C)[None]
    level = np.floor(np.log2(np.where(i == j, C, i ^ j))).astype(np.int32)
    level = np.where((i ^ j) < base, 0, level) if base > 1 else level
    return np.concatenate([np.where(i >= j, level, -1), np.where(i > j, level, -1)], axis=1)


def table_of(C: int, base: int, m: int) -> np.ndarray:
    """Return the table for tiles of m heads: `level_table`, or for `scores_beside` its transposed halves [2 C, m C]."""
    table = level_table(C, base)
    return table if m == 1 else np.tile(np.concatenate([table[:, :C].T, table[:, C:].T]), (1, m))


class ChannelDecays(NamedTuple):
    """Decays between rows of a chunk, all [h, C, K].

    Attributes:
      base: the factors of rows and of columns in base blocks, with the first row of the block for n; None if the base
        is 1.
      levels: for every level b = base, 2 base, ..., C/2, decays over (n, i] in right halves and over (j, n] in left
        halves.
      start: from the start of the chunk to row i, its gate included.
      end: from row i to the end, its gate not included.
      erased: the same as rows for erase keys that read the state before the decay of their token; None where they read
        as queries do.
    """

    base: Any
    levels: list[jax.Array]
    start: jax.Array
    end: jax.Array
    erased: "ChannelDecays | None" = None

    @property
    def readers(self) -> tuple["ChannelDecays", "ChannelDecays"]:
        """The decays of rows of queries, and of rows of erase keys."""
        return self, self if self.erased is None else self.erased


def join_blocks(start: list, end: list, join, total) -> list[list]:
    """Join neighbouring blocks of rows until one is left.

    Args:
      start, end: for every row, the sum or decay from the start of its block to the row, and from the row to the end of
        the block.
      join: joins two sums or decays that follow one another.
      total: makes the sum or decay of a block from the last entry of its `start`.

    Returns:
      The sums or decays of every level on the way, then start and end, all cut like the arguments.
    """
    levels, n, b = [], len(start), 1
    while b < n:
        levels.append([start[i] if i & b else end[i] for i in range(n)])
        totals = [total(start[i | (b - 1)]) for i in range(n)]
        start = [join(totals[i ^ b], x) if i & b else x for i, x in enumerate(start)]
        end = [x if i & b else join(x, totals[i ^ b]) for i, x in enumerate(end)]
        b *= 2
    return [*levels, start, end]


def base_factors(g: list[jax.Array], continuing: list[jax.Array] | None, zeroed: bool = False) -> list[list[jax.Array]]:
    """Return the factors of rows and of columns in blocks of 8 rows, given and returned row by row.

    The factors of a row have no gate of a later row, so that no bit of a result depends on later tokens. Those of the
    second half are products of two decays, because the sum of seven gates may be a number whose power of 2 underflows.

    Args:
      g: the gates.
      continuing: as in `block_decays`. A row that does not continue starts like the first row of the block: factors
        count only gates of their row's sequence, so that no sequence changes the rounding of another.
      zeroed: whether `NEAR_ANCHOR` is the anchor, and the factors beyond it are zeros: of a row, and of its column.
    """
    anchor = NEAR_ANCHOR if zeroed else ANCHOR
    zero, row_0, column_0 = (jnp.full_like(g[0], x) for x in (0.0, anchor, 1 / anchor))
    rows, columns = [row_0], [column_0]
    total, row, column = zero, row_0, column_0  # the gates after a row before, and the factors of that row
    for i in range(1, SUBLANES):
        if i == SUBLANES // 2:
            total, row, column = zero, rows[-1], columns[-1]
        total = total + g[i]
        if continuing is not None:
            pairs = (total, zero), (row, row_0), (column, column_0)
            total, row, column = (jnp.where(continuing[i] > 0.0, *pair) for pair in pairs)
        rows.append(row * jnp.exp2(total))
        columns.append(column * jnp.exp2(-total))
        if zeroed:
            beyond = rows[-1] < jnp.float32(1 / anchor)
            rows[-1], columns[-1] = (jnp.where(beyond, 0.0, x[-1]) for x in (rows, columns))
    return [rows, columns]


def block_decays(
    g: list[jax.Array], base: int, continuing: list[jax.Array] | None = None, erase_before_decay: bool = False,
    zeroed: bool = False,
) -> list[list[jax.Array]]:  # fmt: skip
    """Return the decays in blocks of 8 rows from gates to base 2, row by row.

    Sums of gates have one sign, so nothing cancels; None is the sum of no gates. With a base of 0, only the decays from
    the start and to the end of blocks are returned. If erase keys read the state before the decay of their token, the
    decays of their rows follow, which are decays of the rows before.

    Args:
      g: the gates.
      base: the rows of base blocks.
      continuing: 1 for a row of the same sequence as the row before it, else 0; None if all rows are of one sequence.
      erase_before_decay: whether erase keys read the state before the decay of their token.
      zeroed: as in `base_factors`.
    """
    join = lambda x, y: y if x is None else x if y is None else x + y
    *sums, start, end = join_blocks(g, [None] * len(g), join, lambda x: x)
    sums = [start, end] if base != 1 else [*sums, start, end]
    one = jnp.ones_like(g[0])
    decays = base_factors(g, continuing, zeroed) if base > 1 else []
    decays += [[one if x is None else jnp.exp2(x) for x in each] for each in sums]
    if erase_before_decay:
        of_rows = [x for i, x in enumerate(decays[:-1]) if base <= 1 or i != 1]
        blocks = _row_blocks(base)
        decays += [[x[i - 1] if i % b else one for i in range(len(g))] for x, b in zip(of_rows, blocks, strict=True)]
    return decays


def chunk_decays(blocks, base: int) -> ChannelDecays:
    """Return all decays of a chunk from its `block_decays`, each [h, C, K], as products of these.

    With a base of 0 there are no decays between rows.
    """
    count = count_decays(base)
    (*inside, start, end), erased = blocks[:count], blocks[count:]
    cut = lambda x: [x[:, i : i + SUBLANES] for i in range(0, x.shape[1], SUBLANES)]
    # Rows of queries and of erase keys are joined together, by the same decays of whole blocks.
    starts = list(zip(*map(cut, [start, *erased[-1:]]), strict=True))
    join = lambda x, y: jax.tree.map(lambda z: x * z, y)
    joined = join_blocks(starts, cut(end), join, lambda x: x[0][:, SUBLANES - 1 :])

    def decays(n: int, inside: list) -> ChannelDecays:
        of_rows = [packed.concat_rows([x[n] if isinstance(x, tuple) else x for x in each]) for each in joined]
        *levels, start, end = of_rows
        if base <= 1:
            return ChannelDecays(None, inside + levels if base else [], start, end)
        return ChannelDecays((inside[0], inside[1]), levels, start, end)

    found = decays(0, inside)
    if not erased:
        return found
    # The factors of columns in base blocks are the same.
    return found._replace(erased=decays(1, [*erased[:-1], *(inside[1:] if base > 1 else [])]))


def twice(x: jax.Array) -> jax.Array:
    """Return x above x, for the rows of queries and of keys."""
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


def level_factors(x: ChannelDecays, readers: slice = slice(None)):
    """Yield the factors of every product of the interaction.

    Args:
      x: the decays between rows.
      readers: which of queries and erase keys have rows.

    Yields:
      The index of the product in `level_table`; b, the rows of half a block if these are whole registers, or None, in
      which case all rows and columns take part; the factors of keys as columns, float32 [h, C, K], or if there is a b
      of left halves [h, C / 2, K]; and the factors of queries above the factors of erase keys as rows, [h, 2 C, K], or
      if there is a b of right halves [h, C, K].
    """
    C = x.start.shape[1]
    for n, e in enumerate(x.levels):
        index = C.bit_length() - 1 - len(x.levels) + n
        b, rows = 1 << index, [y.levels[n] for y in x.readers[readers]]
        if b < SUBLANES:
            yield index, None, e, packed.concat_rows(rows)
        else:
            yield index, b, halves(e, b)[0], packed.concat_rows([halves(y, b)[1] for y in rows])
    if x.base is not None:
        yield 0, None, x.base[1], packed.concat_rows([y.base[0] for y in x.readers[readers]])


def interaction_tile(q, e, k, decays: ChannelDecays, table, dtype, pairs: bool = False) -> jax.Array:
    """Return the decayed products of queries and erase keys with keys, transposed.

    Args:
      q, e, k: [h, C, K] float32; e is k where k erases. A reader whose products nobody needs, q or e, is None.
      decays: the decays between rows.
      table: `level_table` [1, C, 2 C], for the base of the decays; the half of the reader if there is one alone.
      dtype: the type of operands of products. Columns keep 16 bits. The rounding of a row is the same for all columns,
        as if it were a slightly different query or key, so sums over new values do not amplify it; the rounding of a
        column is different for every new value of a sum.
      pairs: whether two heads share the products of large levels. The time of a product depends on its rows, which stay
        in the matrix unit, and a level needs only rows of right halves; so the right halves of an odd head take the
        place of the left halves of the even head.

    Returns:
      [h, C, 2 C] float32: row j has <q_i, e^(G_i - G_j) k_j> for i >= j, and beside them <e_i, e^(G_i - G_j) k_j> for i
      > j; [h, C, C] for one reader.
    """
    h, C, operand = k.shape[0], k.shape[1], matmul.operand_dtype(dtype)
    stacked = packed.concat_rows([x for x in (q, e) if x is not None])  # [h, 2 C, K]
    out = jnp.zeros((h, C, stacked.shape[1]), jnp.float32)  # [h, C, 2 C]
    if decays.base is None and q is not None:
        # Pairs of a row with itself, which have no decay, are in no product.
        itself = jnp.sum(q * k, axis=-1, keepdims=True)  # [h, C, 1]
        out = jnp.where(table == C.bit_length() - 1, itself, out)  # [h, C, 2 C]
    for index, b, by_column, by_row in level_factors(decays, slice(q is None, 2 - (e is None))):
        if b is None:
            # Halves with fewer rows than a register: all rows and columns take part, and the table selects pairs.
            columns = packed.split_bf16(k * by_column, dtype)  # each [h, C, K]
            decayed = (stacked * by_row).astype(operand)  # [h, 2 C, K]
            product = matmul.dot_nt(
                packed.concat_lanes(columns), packed.concat_lanes([decayed] * len(columns))
            )  # [h, C, 2 C]
            out = jnp.where(table == index, product, out)  # [h, C, 2 C]
            continue
        # Only columns of left halves and rows of right halves have pairs; to take whole registers apart costs nothing.
        columns = packed.concat_lanes(packed.split_bf16(halves(k, b)[0] * by_column, dtype))  # [h, C / 2, parts K]
        decayed = halves(stacked, b)[1] * by_row  # [h, C, K]
        even, odd = packed.pack_members(decayed, 2) if pairs else (decayed, decayed)  # each [h / 2, C, K], or [h, C, K]
        if b == SUBLANES:  # half a register of bfloat16: joined before it is rounded
            decayed = join_halves(odd, even, b).astype(operand)  # [h / 2, 2 C, K], or [h, 2 C, K]
        else:
            decayed = join_halves(odd.astype(operand), even.astype(operand), b)  # as above
        decayed = packed.concat_lanes([decayed] * (columns.shape[2] // decayed.shape[2]))  # [.., 2 C, parts K]
        if pairs:
            # The columns of both heads of a pair lie below one another, and are multiplied by rows of both. The results
            # of the odd head are one block beside their place.
            product = matmul.dot_nt(packed.concat_rows(packed.pack_members(columns, 2)), decayed)  # [h / 2, C, 2 C]
            product = packed.concat_rows(
                [product[:, : C // 2], packed.rotate(product[:, C // 2 :], b)]
            )  # [h / 2, C, 2 C]
            product = product.reshape(h, C // 2, -1)  # [h, C / 2, 2 C]
        else:
            product = matmul.dot_nt(columns, decayed)  # [h, C / 2, 2 C]
        left, right = halves(out, b)  # each [h, C / 2, 2 C]
        chosen = jnp.where(halves(table, b)[0] == index, product, left)  # [h, C / 2, 2 C]
        out = join_halves(chosen, right, b)  # [h, C, 2 C]
    return out


def scores_beside(q, e, k, decays: ChannelDecays, table, dtype, keys: lanes.Lanes) -> jax.Array:
    """Return the decayed products of queries, above those of erase keys, with keys, float32 [tiles, 2 C, m C].

    The columns of the m heads of a tile lie below one another in a product, each with zeros in the lanes of other
    heads. So the scores of all heads land side by side, and upright. The arguments are as in `interaction_tile`, with
    the table `table_of` [1, 2 C, m C] and the lanes of tiles.
    """
    C, operand, m = k.shape[1], matmul.operand_dtype(dtype), keys.heads
    stacked = packed.concat_rows([q, e])  # [tiles, 2 C, KL]
    out = jnp.zeros((k.shape[0], 2 * C, m * C), jnp.float32)
    if decays.base is None:
        # Pairs of a row with itself, which have no decay, are in no product.
        itself = lanes.Lanes(m, C).together(keys.sums(q * k))[:, :, : m * C]  # [tiles, C, m C]
        out = jnp.where(table == C.bit_length() - 1, twice(itself), out)
    for index, b, by_column, by_row in level_factors(decays):
        # Only rows of right halves have pairs; to take whole registers apart costs nothing.
        rows, of_rows, columns = stacked * by_row if b is None else halves(stacked, b)[1] * by_row, table, k
        if b is None:
            columns = k * by_column
        else:
            of_rows, columns = halves(table, b)[1], halves(k, b)[0] * by_column
            columns = join_halves(columns, columns, b)
        columns = packed.split_bf16(columns, dtype)  # each [tiles, C, KL]
        product = matmul.dot_nt(
            packed.concat_lanes([rows.astype(operand)] * len(columns)),
            packed.concat_lanes([keys.below(x) for x in columns]),
        )  # [tiles, 2 C or C, m C]
        left, right = (None, out) if b is None else halves(out, b)
        right = jnp.where(of_rows == index, product, right)
        out = right if b is None else join_halves(left, right, b)
    return out


def boundary_tile(decays: ChannelDecays, masks: layout.SequenceMasks | None):
    """Return the decays from the start of a chunk, to its end and through it, within one sequence.

    The first of them is a list: for queries, and for erase keys.
    """
    starts = [x.start for x in decays.readers[: 1 if decays.erased is None else 2]]
    end, through = decays.end, decays.start[:, -1:]
    if masks is not None:
        starts = [jnp.where(masks.carried, x, 0.0) for x in starts]
        end, through = jnp.where(masks.ending, end, 0.0), jnp.where(masks.through, through, 0.0)
    return [starts[0], starts[-1]], end, through


def continuing(same: jax.Array) -> jax.Array:
    """Return [n, C, 1], 1 if a row's sequence is also the sequence of the row before, else 0; same is [n, C, C]."""
    C = same.shape[1]
    before = tiles.row_index(C) == tiles.column_index(C) + jnp.int32(1)
    return jnp.sum((before & same).astype(jnp.float32), axis=2, keepdims=True)


def packed_pairs(same: jax.Array, p: int) -> jax.Array:
    """Return `SequenceMasks.same` [1, C, C] for queries above keys, p heads side by side, [1, 2 C, p C].

    A kernel cannot concatenate masks, so numbers are concatenated.
    """
    return twice(packed.concat_lanes([same.astype(jnp.float32)] * p)) > 0.0


def transposed(x):
    """Return the matrices [p, C, R] of a pack transposed and side by side, [1, R, p C]."""
    p, C, R = x.shape
    return jnp.swapaxes(x.reshape(p * C, R), 0, 1)[None]


def pack_scores(
    q, e, k, decays: ChannelDecays, levels, masks: layout.SequenceMasks | None, dtype, keys: lanes.Lanes,
    upright: bool = True,
) -> jax.Array:  # fmt: skip
    """Return the packed scores of queries above the scores of erase keys, [1, 2 C, p C], of a pack of heads.

    Args:
      q, e, k: [p / m, C, KL] float32, q scaled.
      decays: the decays between rows of the chunk.
      levels: `table_of`.
      masks: the masks of a chunk that holds several sequences, or None.
      dtype: the type of operands of products.
      keys: the lanes of tiles.
      upright: otherwise the result is `transposed` later, and masks and several heads a tile are not allowed.
    """
    if keys.heads > 1:
        scores = scores_beside(q, e, k, decays, levels[None], dtype, keys)  # [p / m, 2 C, m C]
        return _within(packed.side_lanes(scores, len(q)), masks, len(q) * keys.heads)
    interaction = interaction_tile(q, e, k, decays, levels[None], dtype, pairs=len(q) % 2 == 0)  # [p, C, 2 C]
    if not upright:
        return interaction
    return _within(transposed(interaction), masks, len(q))


def _within(scores, masks: layout.SequenceMasks | None, p: int) -> jax.Array:
    """Return packed scores [1, 2 C, p C] with zeros between rows of several sequences."""
    return scores if masks is None else jnp.where(packed_pairs(masks.same, p), scores, 0.0)


def pack_boundary(readers, k, beta, decays: ChannelDecays, masks: layout.SequenceMasks | None):
    """Return the rows by which a chunk reads and writes the state, for a pack of heads.

    Args:
      readers: [q, e] or [e], each [t, C, K] float32, q scaled.
      k: [t, C, K] float32.
      beta: [t, C, 1], or for tiles of several heads [t, C, K].
      decays, masks: as in `pack_scores`.

    Returns:
      The rows that read the state before the chunk, decayed from its start: queries, if any, above erase keys, [t, 2 C
      or C, K]; the keys times beta, decayed to the end of the chunk [t, C, K]; the decay over the chunk [t, 1, K].
    """
    from_start, to_end, through = boundary_tile(decays, masks)  # each [t, C, K], and [t, 1, K]
    readers_decayed = packed.concat_rows(readers) * packed.concat_rows(from_start[-len(readers) :])
    return readers_decayed, (k * beta) * to_end, through


def read_state(readers, S):
    """Return the product of readers [tiles, R, K] and the transposed S [tiles, V, K], [tiles, R, V] float32."""
    heads, V, K = S.shape
    # Two tiles fill the 256 x 256 weights of a matrix unit.
    p = 2 if heads % 2 == 0 and 2 * K <= 256 and 2 * V <= 256 else 1
    S = packed.place_tiles(packed.pack_members(S.astype(readers.dtype), p))  # [heads / p, p V, p K]
    return packed.split_lanes(matmul.dot_nt(packed.side_registers(readers, p), S), p)


def write_state(v_new_over_beta, ends):
    """Return v_new_over_beta^T ends, [tiles, V, K] float32, for `split_bf16` of both."""
    left, right = packed.part_pairs(v_new_over_beta, ends)
    return matmul.dot_tn(packed.concat_rows(left), packed.concat_rows(right))
