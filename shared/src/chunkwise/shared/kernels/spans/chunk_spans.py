"""The spans of a launch: the chunk, or the piece of one, that a grid step works on, and the table that says which.

There are three ways to cut the tokens of a launch:

- A row of the batch is one sequence, and a span is a chunk of it. All that a kernel asks follows from the number of the
  span, so there is no table.
- In a packed batch without states, and in rows of segments, a span is a chunk that may hold several sequences. The
  table says which sequence is open between two chunks, and the owner of every token says how the sequences lie in the
  chunk: see `layout.sequence_masks`.
- In a packed batch with states a span is a piece of a chunk that belongs to one sequence, so that every sequence has a
  boundary where its state can be handed in and out: in an array of states, or in the slots of a pool. The table lists
  the pieces.

Tables are in scalar memory, which is small, so they have one number for a chunk, and at most four for a piece.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from chunkwise.shared import tuning
from chunkwise.shared.kernels import chunking
from chunkwise.shared.kernels.spans import pools, segment_tables

# Rows of a table of pieces; the last one is there if states lie in a pool.
SEQUENCE, CHUNK, PLACE, TARGET = range(4)
# The numbers in an entry of the row PLACE, from the lowest bits on: the rows `begin` and `end`, and flags.
_ROW_BITS = 13
_FLAGS = ("first", "last", "opens", "closes", "unowned", "continues")


def make_spans(
    T: int, C: int, cu_seqlens: jax.Array | None, with_states: bool, segment_ids: jax.Array | None = None
) -> tuple[jax.Array | None, jax.Array | None]:
    """Return the spans of a batch: its chunks, or for a packed batch with states the pieces of its chunks.

    Returns:
      The table, None where every row is one sequence. Where a chunk may hold several sequences, int32 [B * (NT + 1)],
      `open_sequences`, and beside it int32 [B * NT, 1, C], the `coded_owners` of tokens. Where spans are pieces, int32
      [3, spans] for `Piece`.
    """
    if cu_seqlens is None and segment_ids is None:
        return None, None
    if cu_seqlens is None or not with_states:
        codes = segment_tables.coded_owners(cu_seqlens, segment_ids, T)
        owner, table = open_sequences(codes, C)
        return table, owner
    p = chunking.varlen_tiles(T, C, cu_seqlens)
    return _table_of_pieces(p, C, (p.chunk + 1) * C > cu_seqlens[-1]), None


def pool_spans(T: int, C: int, routes: pools.Routes, block_size: int | None = None) -> tuple[jax.Array, jax.Array]:
    """Return the spans of a stream of T tokens whose states lie in the slots of a pool: pieces of its chunks.

    They are a table, int32 [4, spans] for `Piece`, and how many of its spans there are, int32. A sequence that has no
    tokens takes no span, and its slots stay as they are. A serving step has many such sequences, which are its decodes.

    Args:
      T, C: tokens and chunk size; static.
      routes: the sequences, and the slots of their states. Only the first column of `target` is read.
      block_size: tokens of a block of `routes.blocks`; static.
    """
    routes, N = _filled_first(routes, T), routes.start.shape[0]
    start, end = routes.start, routes.end
    filled = start < end
    target = routes.target[:, 0]
    if routes.blocks is None:
        p, final = chunking.cut_sequences(T, C, start, end)
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
        p, final = chunking.cut_sequences(T, C, start, end, (token, owner))
        target = jnp.concatenate([target, slot])
    # The slot that a piece writes, -1 for none: a piece writes where a sequence or a block ends.
    spans = jnp.arange(p.chunk.shape[0], dtype=jnp.int32)
    written = final[None] == spans[:, None]
    written = jnp.sum(jnp.where(written, target[None] + 1, jnp.int32(0)), axis=1, dtype=jnp.int32) - 1
    source = chunking.take(routes.source[None] + 1, p.sequence)[0] - 1
    rows = p.begin < p.end
    first = p.first & rows
    reads = jnp.where(first, source, jnp.int32(-1))
    sources, targets = pools.resident_slots(reads, written)
    unowned = (p.chunk * C < start[0]) | ((p.chunk + 1) * C > jnp.max(jnp.where(filled, end, jnp.int32(0))))
    # A sequence that ends with a block has a piece without rows behind the block, which writes its slot.
    run = rows | p.opens if routes.blocks is None else rows | p.opens | (written >= 0)
    count = jnp.max(jnp.where(run, spans + 1, jnp.int32(1)))
    p = p._replace(sequence=sources, first=first, last=written >= 0)
    return _table_of_pieces(p, C, unowned, reads >= 0, targets), count


def _filled_first(routes: pools.Routes, T: int) -> pools.Routes:
    """Return routes, with W = 1, whose sequences without tokens come last: they are at token T and have no slots."""
    filled, index = routes.start < routes.end, jnp.arange(routes.start.shape[0], dtype=jnp.int32)
    earlier = filled[None] & (index[None] < index[:, None])
    place = jnp.where(filled, jnp.sum(earlier, axis=1, dtype=jnp.int32), jnp.int32(-1))
    chosen = place[None] == index[:, None]
    # The sequence that comes to each place; past the end for none, where `take` gives zeros.
    which = jnp.sum(jnp.where(chosen, index[None], jnp.int32(0)), axis=1, dtype=jnp.int32)
    which = jnp.where(jnp.any(chosen, axis=1), which, jnp.int32(len(index)))
    moved = lambda none, *each: chunking.take(jnp.stack(each) - jnp.int32(none), which) + jnp.int32(none)
    start, end = moved(T, routes.start, routes.end)
    source, target = moved(-1, routes.source, routes.target[:, 0])
    blocks = None if routes.blocks is None else moved(-1, *routes.blocks.T).T
    return pools.Routes(start, end, source, target[:, None], blocks)


def _table_of_pieces(p: chunking.VarlenTiles, C: int, unowned: jax.Array, continues=None, target=None) -> jax.Array:
    """Return the table of pieces of chunks of C tokens; the other arguments are attributes of `Piece`."""
    if C >= 2**_ROW_BITS:
        raise NotImplementedError(
            f'"fused" takes fewer than {2**_ROW_BITS} tokens in a grid step of a packed batch with states; got {C} by '
            f"`config`."
        )
    empty = p.begin == p.end
    begin, end = (jnp.where(empty, jnp.int32(0), x) for x in (p.begin, p.end))
    place = begin | end << jnp.int32(_ROW_BITS)
    flags = (p.first, p.last, p.opens, p.closes, unowned) + (() if continues is None else (continues,))
    for i, flag in enumerate(flags):
        place |= flag.astype(jnp.int32) << jnp.int32(2 * _ROW_BITS + i)
    return jnp.stack([p.sequence, p.chunk, place] + ([] if target is None else [target]))


def limit_of_chunks(B: int, T: int, C: int) -> str | None:
    """Return why scalar memory has no room for the chunks of rows that may hold several sequences; None if it has."""
    return _limit("chunks", 1, B * (chunking.num_chunks(T, C) + 1))


def limit_of_pieces(T: int, C: int, sequences: int, block_size: int | None = None) -> str | None:
    """Return why scalar memory has no room for the pieces of sequences, and of blocks of tokens; None if it has."""
    blocks = 0 if block_size is None else T // block_size
    return _limit("pieces of chunks", 4, chunking.num_chunks(T, C) + sequences + blocks)


def _limit(kind: str, rows: int, count: int) -> str | None:
    most = 128 * tuning.SMEM_LIMIT_BYTES // tuning.smem_bytes(rows, 128)
    if count <= most:
        return None
    return (
        f'"fused" lists the {kind} of segments and packed sequences in scalar memory, which has room for {most}; got '
        f'{count}: use fewer tokens or sequences in a call, a larger `chunk_size`, or implementation="xla".'
    )


def open_sequences(codes: jax.Array, C: int) -> tuple[jax.Array, jax.Array]:
    """Return how the sequences of a stream, or of rows of segments, lie in the chunks of C tokens.

    Args:
      codes: int32 [B, T], `coded_owners`.
      C: tokens of a chunk.

    Returns:
      The `coded_owners` of chunks, int32 [B * NT, 1, C]; and int32 [B * (NT + 1)], for every row of the batch the
      sequences that are open before its chunks, and after the last one. The sequence before a chunk that needs masks is
      coded by its complement: a new sequence begins in such a chunk or with it, or it holds padding.
    """
    last = codes[:, -1:]
    # Rows past the last token are padding.
    past = jnp.broadcast_to(jnp.minimum(last, ~last), (codes.shape[0], -codes.shape[1] % C))
    owner = jnp.concatenate([codes, past], axis=1).reshape(codes.shape[0], -1, C)
    # Before the first chunk the sequence of its first token is open.
    opened = segment_tables.decoded(jnp.concatenate([owner[:, :1, 0], owner[:, :, -1]], axis=1))  # [B, NT + 1]
    closed = jnp.concatenate([opened[:, 1:], opened[:, -1:]], axis=1)
    mixed = (opened != closed) | jnp.pad(jnp.min(owner, axis=2) < 0, ((0, 0), (0, 1)))
    table = jnp.where(mixed, ~opened, opened)
    return owner.reshape(-1, 1, C), table.reshape(-1)


def whole_spans(table: jax.Array, owner: jax.Array, B: int, chunks: int) -> tuple[jax.Array, jax.Array]:
    """Return the results of `open_sequences` for spans of so many chunks: rows of the batch end with chunks of padding.

    Args:
      table: int32 [B * (NT + 1)].
      owner: int32 [B * NT, 1, lanes].
      B: rows of the batch.
      chunks: chunks of a span.
    """
    table, owner = table.reshape(B, -1), owner.reshape(B, -1, *owner.shape[1:])
    more = -owner.shape[1] % chunks
    padded = lambda x, last: jnp.concatenate([x, *[jnp.minimum(last, ~last)] * more], axis=1)
    table = jnp.concatenate([padded(table[:, :-1], table[:, -1:]), table[:, -1:]], axis=1)
    # Of the last chunk, every token but the last one may be of another sequence.
    last = jnp.broadcast_to(owner[:, -1:, :, -1:], (B, 1, *owner.shape[2:]))
    return table.reshape(-1), padded(owner, last).reshape(-1, *owner.shape[2:])


# Inside of kernels.


class Span:
    """A chunk of a row of the batch; every attribute is a scalar int32.

    Attributes:
      chunk: the number of the chunk in its row.
      first, last: 1 where it is the first or the last one.
      begin, end: the rows of the chunk that hold tokens; the end may lie behind its last row.
      before, final: the sequence of the token before the chunk, or of the first token of a row, and of the last token
        of the chunk; only with a table.
      mixed: 1 where the chunk does not lie inside one sequence; only with a table.
    """

    def __init__(self, chunk, T: int, C: int, table_ref: Any = None, row: jax.Array | int = 0):
        """Describe a chunk of a row of T tokens whose entries of `open_sequences` begin at `row` of a table."""
        self.chunk, self._T, self._C, self._table, self._row = chunk, T, C, table_ref, row

    first = property(lambda self: (self.chunk == 0).astype(jnp.int32))
    last = property(lambda self: ((self.chunk + 1) * self._C >= self._T).astype(jnp.int32))
    begin = property(lambda self: jnp.int32(0))
    end = property(lambda self: self._T - self.chunk * self._C)
    before = property(lambda self: segment_tables.decoded(self._table[self._row + self.chunk]))
    final = property(lambda self: segment_tables.decoded(self._table[self._row + self.chunk + 1]))
    mixed = property(lambda self: (self._table[self._row + self.chunk] < 0).astype(jnp.int32))

    def of_chunk(self, index: jax.Array) -> "Span":
        """Return the chunk that is `index` chunks after this one."""
        return Span(self.chunk + index, self._T, self._C, self._table, self._row)

    def rows(self, C: int) -> jax.Array:
        """Return which rows of the chunk belong to the span, bool [C, 1]."""
        row = lax.broadcasted_iota(jnp.int32, (C, 1), 0)
        return (row >= self.begin) & (row < self.end)

    def columns(self, C: int) -> jax.Array:
        """Return `rows` for values that lie in the lanes, bool [1, C]."""
        column = lax.broadcasted_iota(jnp.int32, (1, C), 1)
        return (column >= self.begin) & (column < self.end)


def _entry(row: int) -> Any:
    """Return the attribute of a `Piece` that is its entry in a row of the table."""
    return property(lambda self: self._table[row, self._n])


def _flag(name: str) -> property:
    """Return the attribute of a `Piece` that is one of `_FLAGS`."""
    first = 2 * _ROW_BITS + _FLAGS.index(name)
    return property(lambda self: self._bits(first, 1))


class Piece(Span):
    """A piece of a chunk, as the table of pieces says; every attribute is a scalar int32.

    Attributes:
      sequence: the sequence whose state goes in and out; over a pool, the slot whose block the grid step holds to read.
      first, last: 1 where the piece is the first or the last one of its sequence; over a pool, `last` is 1 where the
        grid step writes a state, also at the end of a block of tokens.
      chunk: the chunk of the stream.
      begin, end: the rows of the chunk that belong to the piece; other rows may hold anything. If a piece is of several
        chunks, they count through all of these. Both are 0 for a piece without rows.
      opens, closes: 1 where the piece is the first or the last one of its chunk.
      unowned: 1 where the chunk has rows that no piece owns.
      target: over a pool, the slot whose block the grid step holds to write.
      continues: over a pool, 1 where a sequence starts with this piece from the state in a slot, and not from zeros.
    """

    def __init__(self, table_ref, n, C: int, start: jax.Array | int = 0):
        """Read entry n of a table of pieces; rows of a chunk of C are counted from row `start` of the block."""
        self._table, self._n, self._C, self._start = table_ref, n, C, start

    def _bits(self, first: int, count: int) -> jax.Array:
        return (self._table[PLACE, self._n] >> jnp.int32(first)) & jnp.int32(2**count - 1)

    sequence, chunk, target = _entry(SEQUENCE), _entry(CHUNK), _entry(TARGET)
    begin = property(lambda self: self._bits(0, _ROW_BITS) - self._start)
    end = property(lambda self: self._bits(_ROW_BITS, _ROW_BITS) - self._start)
    first, last = _flag("first"), _flag("last")
    opens, closes = _flag("opens"), _flag("closes")
    unowned, continues = _flag("unowned"), _flag("continues")

    def of_chunk(self, index: jax.Array) -> "Piece":
        """Return the piece with the rows that it has in one of its chunks; it may begin before and end after it."""
        return Piece(self._table, self._n, self._C, index * jnp.int32(self._C))
