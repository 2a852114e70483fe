"""How the user's arrays go into the fused kernels and back: flat tokens, blocks of heads, and the table of steps.

A tensor [B, T, heads, D] is seen flat, [B, T, heads * lanes]: a head is a slice of whole registers of 128 lanes, and so
is a block of heads. This view costs nothing if D is a multiple of 128, because projections produce it. The grid of a
launch is (row of the batch, block of heads, step): time is its last axis and sequential, and the state lives in VMEM
across it.

A step is a chunk, or a piece of one. The table of steps says which; see `TableStep`. There are three ways to cut:

- A row of the batch is one sequence, and a step is a chunk of it.
- In a packed batch without states, and in rows of segments, a step is a chunk that may hold several sequences: the
  table and the owner of every token say how they lie in it, and `sequence_masks` keeps them apart.
- In a packed batch with states a step is a piece of a chunk that belongs to one sequence, so that every sequence has a
  boundary where its state can be handed in and out: in an array of states, or in the slots of a pool.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl

from chunkwise.shared.kernels import chunking, matmul, packed, pools, segment_tables, tiles

# Outside of kernels: the user's arrays as the kernels read them, and back. JAX transposes these functions for the
# backward.


def to_lanes(x: jax.Array, T: int) -> jax.Array:
    """Return [B, t, heads, D] as the flat view [B, T, heads * lanes], padded with zeros."""
    x = chunking.pad_tokens(x, T)
    D = x.shape[3]
    if packed.pad_lanes(D) != D:
        x = jnp.pad(x, [(0, 0)] * 3 + [(0, packed.pad_lanes(D) - D)])
    return x.reshape(*x.shape[:2], -1)


def from_lanes(x: jax.Array, heads: int, D: int, T: int) -> jax.Array:
    """Return the flat view as [B, T, heads, D], without its padding; the inverse of `to_lanes`."""
    return x.reshape(*x.shape[:2], heads, -1)[:, :T, :, :D]


def to_rows(x: jax.Array, C: int) -> jax.Array:
    """Return a value per token [B, t, HV] as rows of its chunks [B, NT, HV, C], zeros past the last token."""
    x = chunking.pad_tokens(x, chunking.num_chunks(x.shape[1], C) * C)
    return jnp.moveaxis(x.reshape(x.shape[0], -1, C, x.shape[2]), 2, 3)


def pad_states(x: jax.Array | None) -> jax.Array | None:
    """Return states [N, HV, K, V], or [N, HV, V, K], in float32 with both last dimensions padded to whole lanes."""
    if x is None:
        return None
    missing = [(0, packed.pad_lanes(n) - n) for n in x.shape[2:]]
    return jnp.pad(x.astype(jnp.float32), [(0, 0), (0, 0), *missing])


def unless_empty(states: jax.Array, otherwise: jax.Array | None, cu_seqlens: jax.Array | None) -> jax.Array:
    """Return states [N, ...]; empty sequences, which no kernel visits, get `otherwise`, or zeros for None."""
    if cu_seqlens is None:
        return states
    empty = (jnp.diff(cu_seqlens) == 0).reshape(-1, *(1,) * (states.ndim - 1))
    return jnp.where(empty, jnp.zeros((), states.dtype) if otherwise is None else otherwise, states)


# Rows of the table of steps.
SEQUENCE, FIRST, LAST, CHUNK, BEGIN, END, OPENS, CLOSES, BEFORE, FINAL, MIXED = range(11)
# Further rows where states lie in a pool.
TARGET, CONTINUES = range(11, 13)


class Steps(NamedTuple):
    """The steps of a launch.

    Attributes:
      table: int32 [11, B * steps], read through `TableStep`; 13 rows where states lie in a pool.
      owner: int32 [B * NT, 1, C], the `coded_owners` of tokens where a chunk may hold several sequences, else None.
    """

    table: jax.Array
    owner: jax.Array | None


def make_steps(
    B: int,
    T: int,
    C: int,
    cu_seqlens: jax.Array | None,
    with_states: bool,
    segment_ids: jax.Array | None = None,
) -> Steps:
    """Return the steps of a batch: its chunks, or for a packed batch with states the pieces of its chunks."""
    NT = chunking.num_chunks(T, C)
    if cu_seqlens is not None and with_states:
        p = chunking.varlen_tiles(T, C, cu_seqlens)
        # The fields of `VarlenTiles` are the first rows of the table.
        padded = (p.chunk + 1) * C > cu_seqlens[-1]
        rows = (*p, p.sequence, p.sequence, padded)
        return Steps(jnp.stack([x.astype(jnp.int32) for x in rows]), None)
    # In numpy, because XLA would run an operation for every row of the table before each launch.
    row, chunk = np.repeat(np.arange(B), NT), np.tile(np.arange(NT), B)
    zeros, ones = np.zeros_like(chunk), np.ones_like(chunk)
    steps = (row, chunk == 0, chunk == NT - 1, chunk, zeros, np.minimum(T - chunk * C, C), ones, ones)
    if cu_seqlens is None and segment_ids is None:
        return Steps(jnp.asarray(np.stack([*steps, row, row, zeros]).astype(np.int32)), None)
    owner, *mixing = chunk_owners(T, C, cu_seqlens, segment_ids)
    return Steps(jnp.concatenate([np.stack(steps).astype(np.int32), jnp.stack(mixing)]), owner)


def pool_steps(T: int, C: int, routes: pools.Routes, block_size: int | None = None) -> Steps:
    """Return the steps of a stream of T tokens whose states lie in the slots of a pool: pieces of its chunks.

    A sequence that has no tokens takes no step, and its slots stay as they are.

    Args:
      T, C: tokens and chunk size; static.
      routes: the sequences, and the slots of their states. Only the first column of `target` is read.
      block_size: tokens of a block of `routes.blocks`; static.
    """
    start, end, N = routes.start, routes.end, routes.start.shape[0]
    filled = start < end
    target = jnp.where(filled, routes.target[:, 0], jnp.int32(-1))
    if routes.blocks is None:
        p, final = chunking.cut(T, C, start, end)
    else:
        assert block_size is not None
        # Full blocks are numbered through all sequences; there are at most as many as fit into T tokens.
        full = jnp.where(filled, (end - start) // block_size, jnp.int32(0))
        index, after = jnp.arange(N, dtype=jnp.int32), jnp.arange(1, T // block_size + 1, dtype=jnp.int32)
        upto = jnp.sum(jnp.where(index[None] <= index[:, None], full[None], jnp.int32(0)), axis=1, dtype=jnp.int32)
        owner = jnp.sum(upto[None] < after[:, None], axis=1, dtype=jnp.int32)  # N for a block that is not full
        first, earlier = chunking.take(jnp.stack([start, upto - full]), owner)
        place = after - earlier  # counted from 1
        token = jnp.where(owner < N, first + place * block_size, chunking.num_chunks(T, C) * C)
        M = routes.blocks.shape[1]
        slot = chunking.take(routes.blocks.reshape(-1), owner * M + place - 1)
        slot = jnp.where((owner < N) & (place <= M), slot, jnp.int32(-1))
        p, final = chunking.cut(T, C, start, end, (token, owner))
        target = jnp.concatenate([target, slot])
    # The slot that a piece writes, -1 for none: a piece writes where a sequence or a block ends.
    steps = jnp.arange(p.chunk.shape[0], dtype=jnp.int32)
    written = final[None] == steps[:, None]
    written = jnp.sum(jnp.where(written, target[None] + 1, jnp.int32(0)), axis=1, dtype=jnp.int32) - 1
    source = chunking.take(jnp.where(filled, routes.source, jnp.int32(-1))[None] + 1, p.sequence)[0] - 1
    rows = p.begin < p.end
    first = p.first & rows
    reads = jnp.where(first, source, jnp.int32(-1))
    sources, targets = pools.resident_slots(reads, written)
    padded = (p.chunk * C < start[0]) | ((p.chunk + 1) * C > end[-1])
    none = jnp.zeros_like(steps)
    table = (
        sources, first, written >= 0, p.chunk, p.begin, p.end, p.opens, p.closes, none, none, padded,
        targets, reads >= 0,
    )  # fmt: skip
    return Steps(jnp.stack([x.astype(jnp.int32) for x in table]), None)


def chunk_owners(
    T: int, C: int, cu_seqlens: jax.Array | None, segment_ids: jax.Array | None
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Return how the sequences of a stream, or of rows of segments, lie in the chunks of C tokens.

    Returns:
      Four arrays, all int32: the `coded_owners` of chunks [B * NT, 1, C]; and for every chunk, [B * NT], the sequence
      of the token before it, or of its first token if there is none before; the sequence of its last token; and 1 if it
      needs masks, because a new sequence begins in it or with it, or because it holds padding.
    """
    codes = segment_tables.coded_owners(cu_seqlens, segment_ids, T)
    last = codes[:, -1:]
    # Rows past the last token are padding.
    past = jnp.broadcast_to(jnp.minimum(last, ~last), (codes.shape[0], chunking.num_chunks(T, C) * C - T))
    owner = jnp.concatenate([codes, past], axis=1).reshape(codes.shape[0], -1, C)
    final = decoded(owner[:, :, -1])
    before = jnp.concatenate([decoded(owner[:, :1, 0]), final[:, :-1]], axis=1)
    mixed = ((before != final) | (jnp.min(owner, axis=2) < 0)).astype(jnp.int32)
    return owner.reshape(-1, 1, C), before.reshape(-1), final.reshape(-1), mixed.reshape(-1)


def decoded(owner: jax.Array) -> jax.Array:
    """Return the sequences of tokens from `coded_owners`; for padding, the sequence before it."""
    # The complement of x where x is negative, and x elsewhere, without a selection.
    return owner ^ lax.shift_right_arithmetic(owner, jnp.full_like(owner, 31))


# Inside of kernels.


class TableStep:
    """A step of a launch, as the table in scalar memory says; every attribute is a scalar int32.

    Attributes:
      sequence: the sequence whose state goes in and out; over a pool, the slot whose block the step holds to read.
      first, last: 1 where the step is the first or the last of its sequence; over a pool, `last` is 1 where the step
        writes a state, also at the end of a block of tokens.
      chunk: the chunk of the row of the batch.
      begin, end: the rows of the chunk that belong to the step; other rows may hold anything. If a step is a piece of
        several chunks, they count through all of these.
      opens, closes: 1 where the step is the first or the last of its chunk.
      before, final: the sequence of the token before the chunk, and of the last token of the chunk.
      mixed: 1 where the chunk does not lie inside one sequence: see `chunk_owners`. If steps are pieces, 1 where the
        chunk has rows that no piece owns.
      target: over a pool, the slot whose block the step holds to write.
      continues: over a pool, 1 where a sequence starts with this step from the state in a slot, and not from zeros.
    """

    def __init__(self, table_ref, n, start=None):
        """Read row n of the table; rows of a chunk are counted from row `start` of the block, None for 0."""
        self._table, self._n, self._start = table_ref, n, start

    def _from_start(self, row: int) -> jax.Array:
        return self._table[row, self._n] if self._start is None else self._table[row, self._n] - self._start

    sequence = property(lambda self: self._table[SEQUENCE, self._n])
    first = property(lambda self: self._table[FIRST, self._n])
    last = property(lambda self: self._table[LAST, self._n])
    chunk = property(lambda self: self._table[CHUNK, self._n])
    begin = property(lambda self: self._from_start(BEGIN))
    end = property(lambda self: self._from_start(END))
    opens = property(lambda self: self._table[OPENS, self._n])
    closes = property(lambda self: self._table[CLOSES, self._n])
    before = property(lambda self: self._table[BEFORE, self._n])
    final = property(lambda self: self._table[FINAL, self._n])
    mixed = property(lambda self: self._table[MIXED, self._n])
    target = property(lambda self: self._table[TARGET, self._n])
    continues = property(lambda self: self._table[CONTINUES, self._n])

    @property
    def empty(self) -> jax.Array:
        """Whether no row belongs to the step."""
        return self.begin == self.end

    def of_chunk(self, index: jax.Array, C: int, pieces: bool) -> "TableStep":
        """Return one of the chunks of a step: with the rows that a piece has in it, or its entry in a table of chunks.

        A piece may begin before the chunk and end after it.
        """
        n, start = (self._n, index * jnp.int32(C)) if pieces else (self._n + index, None)
        return TableStep(self._table, n, start)

    def rows(self, C: int) -> jax.Array:
        """Return which rows of the chunk belong to the step, bool [C, 1]."""
        row = lax.broadcasted_iota(jnp.int32, (C, 1), 0)
        return (row >= self.begin) & (row < self.end)

    def columns(self, C: int) -> jax.Array:
        """Return `rows` for values that lie in the lanes, bool [1, C]."""
        column = lax.broadcasted_iota(jnp.int32, (1, C), 1)
        return (column >= self.begin) & (column < self.end)


class RowStep(TableStep):
    """A chunk of a row of the batch that is one sequence, in a launch without a table.

    Scalar memory holds the table of less than a million tokens; a launch that reads no table takes any number of
    tokens.
    """

    def __init__(self, chunk, T: int, C: int):
        self._chunk, self._T, self._C = chunk, T, C

    chunk = property(lambda self: self._chunk)
    first = property(lambda self: (self._chunk == 0).astype(jnp.int32))
    last = property(lambda self: ((self._chunk + 1) * self._C >= self._T).astype(jnp.int32))
    begin = property(lambda self: jnp.int32(0))
    end = property(lambda self: self._T - self._chunk * self._C)

    def of_chunk(self, index: jax.Array, C: int, pieces: bool) -> "RowStep":
        """Return the chunk that is `index` chunks after this one; its end may lie behind its last row."""
        return RowStep(self._chunk + index, self._T, C)


class SequenceMasks(NamedTuple):
    """How sequences lie in a chunk; padding counts as a part of the sequence before it.

    Attributes:
      same: bool [1, C, w], pairs of rows and columns of one sequence.
      carried: bool [1, C, 1], rows of the sequence that is open where the chunk begins: they read the state before the
        chunk.
      ending: bool [1, C, 1], rows of the sequence that is open where the chunk ends: they add to the state after the
        chunk.
      through: bool scalar, the chunk lies inside one sequence, so that the state passes through it.
      code: int32 [1, C, 1], the `coded_owners` of the rows: below 0 for padding.
    """

    same: jax.Array
    carried: jax.Array
    ending: jax.Array
    through: jax.Array
    code: jax.Array


def sequence_masks(owner: jax.Array, C: int, before: jax.Array, final: jax.Array) -> SequenceMasks:
    """Return the masks of a chunk.

    Args:
      owner: int32 [1, w], the `coded_owners` of the tokens, repeated where w is a multiple of C.
      C: rows of the chunk.
      before, final: the sequence of the token before the chunk, and of the last token of the chunk.
    """
    # [1, 1, C] -> [1, C, 1]; sequences are counted exactly in float32.
    code = tiles.to_column(owner[None, :, :C].astype(jnp.float32)).astype(jnp.int32)
    column = decoded(code)
    return SequenceMasks(column == decoded(owner)[None], column == before, column == final, before == final, code)


def load_heads(ref, width: int, heads: slice = slice(None), valid: jax.Array | None = None, at=slice(None)):
    """Load some heads of a flat block [rows, heads * width] as tiles [heads, C, width].

    Args:
      ref: the block.
      width: lanes of a head.
      heads: which heads.
      valid: bool [C, 1]; rows that are not valid become zeros. None for all.
      at: which rows of the block.
    """
    each = range(ref.shape[1] // width)[heads]
    tiles = jnp.stack([ref[at, i * width : (i + 1) * width] for i in each])
    return tiles if valid is None else jnp.where(valid[None], tiles, jnp.zeros_like(tiles))


def store_rows(ref, lanes, x: jax.Array, valid: jax.Array | None = None, at=slice(None)) -> None:
    """Store in `lanes` of a block the rows of x [C, n] that are `valid`, bool [C, 1]; None for all rows."""
    x = x.astype(ref.dtype)
    ref[at, lanes] = x if valid is None else jnp.where(valid, x, ref[at, lanes])


def store_heads(ref, tiles: jax.Array, valid: jax.Array | None = None, first: int = 0, at=slice(None)) -> None:
    """Store tiles [heads, C, width] as the heads from `first` on of a flat block; the inverse of `load_heads`."""
    width = tiles.shape[2]
    for i in range(tiles.shape[0]):
        store_rows(ref, slice((first + i) * width, (first + i + 1) * width), tiles[i], valid, at)


def load_every(ref, n: int) -> list[jax.Array]:
    """Return the rows i, i + n, i + 2 n ... of a Ref [C, lanes] for every i below n, each [C / n, lanes].

    In a compiled kernel they are loads with a stride. An interpreted load with a stride would be a gather with an index
    for every number, which takes longer to compile than the rest of a kernel.
    """
    if matmul.is_interpreted():
        x = ref[...].reshape(-1, n, ref.shape[-1])
        return [x[:, i] for i in range(n)]
    return [ref[pl.ds(i, ref.shape[0] // n, stride=n), :] for i in range(n)]


def store_every(ref, rows: list[jax.Array]) -> None:
    """Store rows in the form in which `load_every` returns them."""
    n = len(rows)
    if matmul.is_interpreted():
        ref[...] = jnp.stack(rows, axis=1).reshape(ref.shape)
        return
    for i, x in enumerate(rows):
        ref[pl.ds(i, ref.shape[0] // n, stride=n), :] = x


def sum_value_heads(x: jax.Array, group: int) -> jax.Array:
    """Return tiles [heads, m, w] summed over the `group` value heads of every key head, [heads / group, m, w]."""
    return jnp.stack([sum(x[i + j] for j in range(group)) for i in range(0, x.shape[0], group)])


def clear(*refs) -> None:
    """Store zeros; None is passed over."""
    for ref in refs:
        if ref is not None:
            ref[...] = jnp.zeros_like(ref)


class Blocks:
    """The BlockSpecs of a launch over the grid (row of the batch, block of heads, grid step).

    A grid step works on the step `at(grid_step)`, so every stage of a software pipeline has its `Blocks`, and backward
    kernels count down. Of the scalar tables of the launch, the table of steps is the first; it is read only where steps
    are pieces.
    """

    def __init__(self, C: int, steps: int, at: Callable, varlen: bool, chunks: int = 1):
        """Cut the arrays of a launch.

        Args:
          C: tokens of a chunk.
          steps: steps of a row of the batch.
          at: the step of every grid step.
          varlen: whether steps are pieces of chunks, each of one sequence, which the table of steps lists.
          chunks: chunks of a step.
        """
        self.C, self.steps, self.at, self.varlen, self.chunks = C, steps, at, varlen, chunks

    def _chunk(self, b, grid_step, tables):
        step = self.at(grid_step)
        return tables[0][CHUNK, b * self.steps + step] if self.varlen else step

    def tokens(self, lanes: int, share: int = 1) -> pl.BlockSpec:
        """Cut flat tokens [B, T, all lanes]; `share` blocks of heads read the same block of lanes."""

        def index(b, h, grid_step, *tables):
            return b, self._chunk(b, grid_step, tables), h if share == 1 else lax.div(h, jnp.int32(share))

        return pl.BlockSpec((None, self.chunks * self.C, lanes), index)

    def values(self, heads: int) -> pl.BlockSpec:
        """Cut a value per token [B, blocks, T, heads]."""
        index = lambda b, h, grid_step, *tables: (b, h, self._chunk(b, grid_step, tables), 0)
        return pl.BlockSpec((None, None, self.chunks * self.C, heads), index)

    def rows(self, *block: int | None) -> pl.BlockSpec:
        """Cut a value per token whose tokens lie in the lanes, [B, NT, blocks, heads, C] or [B, NT, HV, 1, C]."""
        index = lambda b, h, grid_step, *tables: (b, self._chunk(b, grid_step, tables), h, 0, 0)
        return pl.BlockSpec((None, *block), index)

    def owner(self, lanes: int) -> pl.BlockSpec:
        """Cut the owners of tokens [B * NT, 1, lanes]."""
        index = lambda b, h, grid_step, *_: (b * self.steps + self.at(grid_step), 0, 0)
        return pl.BlockSpec((self.chunks, 1, lanes), index)

    def state(self, *tail: int) -> pl.BlockSpec:
        """Cut the state of the sequence, or the slot to read, of [N, HV, ...]; `tail` is (heads of a block, ...)."""
        return self._by_table(SEQUENCE, tail) if self.varlen else self.per_row(*tail)

    def target(self, *tail: int) -> pl.BlockSpec:
        """Cut the slot to write of a pool [slots, HV, ...]."""
        return self._by_table(TARGET, tail)

    def _by_table(self, row: int, tail: tuple[int, ...]) -> pl.BlockSpec:
        def index(b, h, grid_step, table, *_):
            return table[row, b * self.steps + self.at(grid_step)], h, *(0 for _ in tail[1:])

        return pl.BlockSpec((None, *tail), index)

    def unread(self) -> pl.BlockSpec:
        """Cut always the same block, which nobody reads, of flat tokens [B, T, all lanes]."""
        return pl.BlockSpec((None, 16, 128), lambda *_: (0, 0, 0))

    def per_row(self, *tail: int) -> pl.BlockSpec:
        """Cut an array with one entry for every row of the batch, [B, HV, ...]; `tail` is (heads of a block, ...)."""
        return pl.BlockSpec((None, *tail), lambda b, h, *_: (b, h, *(0 for _ in tail[1:])))

    def per_step(self, *tail: int) -> pl.BlockSpec:
        """Cut an array with one entry for every step, [B, steps, all, ...]; `tail` is (how many a block has, ...)."""
        return pl.BlockSpec(
            (None, None, *tail), lambda b, h, grid_step, *_: (b, self.at(grid_step), h, *(0 for _ in tail[1:]))
        )
