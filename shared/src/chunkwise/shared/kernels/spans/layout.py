"""How the user's arrays go into the fused kernels and back: flat tokens, blocks of heads, and sequences in chunks.

A tensor [B, T, heads, D] is seen flat, [B, T, heads * D], as projections produce it, so that this view costs nothing: a
head is a slice of lanes. Blocks of heads are whole registers of 128 lanes, or all heads. The grid of a
launch is (row of the batch, block of heads, grid step): time is its last axis and sequential, and the state lives in
VMEM across it.

`chunk_spans` says what a span is.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from chunkwise.shared.kernels import chunking, interleaved, matmul, packed, tiles, windows
from chunkwise.shared.kernels.spans import chunk_spans, segment_tables

Refs = TypeVar("Refs", bound=Any)

# Outside of kernels: the user's arrays as the kernels read them, and back. JAX transposes these functions for the
# backward.


def to_lanes(x: jax.Array | interleaved.Interleaved, T: int, n: int = 1) -> Any:
    """Return [B, t, heads, D] as the flat view [B, T, heads * D], D padded with zeros.

    Where other arrays are `Interleaved` of n kinds, so are those of the result, or it is `InLanes`.
    """
    if isinstance(x, interleaved.Interleaved):
        return x.map(lambda y: to_lanes(y, T // len(x.arrays)))
    if n > 1:
        rows = x.reshape(x.shape[0], x.shape[1] // n, n * x.shape[2], x.shape[3])
        return interleaved.InLanes(to_lanes(rows, T // n), n)
    x = chunking.pad_tokens(x, T)
    D = x.shape[3]
    if packed.pad_channels(D) != D:
        x = jnp.pad(x, [(0, 0)] * 3 + [(0, packed.pad_channels(D) - D)])
    return x.reshape(*x.shape[:2], -1)


def from_lanes(x: jax.Array, heads: int, D: int, T: int) -> jax.Array:
    """Return the flat view as [B, T, heads, D], without its padding; the inverse of `to_lanes`."""
    return x.reshape(*x.shape[:2], heads, -1)[:, :T, :, :D]


def to_rows(x: jax.Array, C: int) -> jax.Array:
    """Return a value per token [B, t, HV] as rows of its chunks [B, NT, HV, C], zeros past the last token."""
    x = chunking.pad_tokens(x, chunking.num_chunks(x.shape[1], C) * C)
    return jnp.moveaxis(x.reshape(x.shape[0], -1, C, x.shape[2]), 2, 3)


def pad_states(x: jax.Array | None) -> jax.Array | None:
    """Return states [N, HV, K, V], or [N, HV, V, K], in float32 with both last dimensions padded."""
    if x is None:
        return None
    missing = [(0, packed.pad_channels(n) - n) for n in x.shape[2:]]
    return jnp.pad(x.astype(jnp.float32), [(0, 0), (0, 0), *missing])


def unless_empty(states: jax.Array, otherwise: jax.Array | None, cu_seqlens: jax.Array | None) -> jax.Array:
    """Return states [N, ...] with `otherwise`, or zeros for None, for empty sequences.

    A forward runs no grid step whose pieces have no rows, so that it may not write their states.
    """
    if cu_seqlens is None:
        return states
    empty = (jnp.diff(cu_seqlens) == 0).reshape(-1, *(1,) * (states.ndim - 1))
    return jnp.where(empty, jnp.zeros((), states.dtype) if otherwise is None else otherwise, states)


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
    column = segment_tables.decoded(code)
    same = column == segment_tables.decoded(owner)[None]
    return SequenceMasks(same, column == before, column == final, before == final, code)


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


def slice_refs(refs: Refs, places: Mapping[str, Any]) -> Refs:
    """Return a record of Refs with those at these names replaced by their parts at these places; None stays None."""
    found = {name: getattr(refs, name) for name in places}
    return refs._replace(**{name: ref.at[places[name]] for name, ref in found.items() if ref is not None})


def clear(*refs) -> None:
    """Store zeros; None is passed over."""
    for ref in refs:
        if ref is not None:
            ref[...] = jnp.zeros_like(ref)


class Blocks:
    """The BlockSpecs of a launch over the grid (row of the batch, block of heads, grid step).

    A grid step works on the span `at(grid_step)`, so every stage of a software pipeline has its `Blocks`, and backward
    kernels count down. Of the scalar tables of the launch, the table of spans is the first; it is read only where spans
    are pieces, which a batch of one row has.
    """

    def __init__(self, C: int, spans: int, at: Callable, varlen: bool, chunks: int = 1):
        """Cut the arrays of a launch.

        Args:
          C: tokens of a chunk.
          spans: spans of a row of the batch.
          at: the span of every grid step.
          varlen: whether spans are pieces of chunks, each of one sequence, which the table of spans lists.
          chunks: chunks of a span.
        """
        self.C, self.spans, self.at, self.varlen, self.chunks = C, spans, at, varlen, chunks

    def _chunk(self, grid_step, tables):
        span = self.at(grid_step)
        return tables[0][chunk_spans.CHUNK, span] if self.varlen else span

    def tokens(self, lanes: int, share: int = 1) -> pl.BlockSpec:
        """Cut flat tokens [B, T, all lanes]; `share` blocks of heads read the same block of lanes."""

        def index(b, h, grid_step, *tables):
            return b, self._chunk(grid_step, tables), h if share == 1 else lax.div(h, jnp.int32(share))

        return pl.BlockSpec((None, self.chunks * self.C, lanes), index)

    def values(self, heads: int) -> pl.BlockSpec:
        """Cut a value per token [B, blocks, T, heads]."""
        index = lambda b, h, grid_step, *tables: (b, h, self._chunk(grid_step, tables), 0)
        return pl.BlockSpec((None, None, self.chunks * self.C, heads), index)

    def rows(self, *block: int | None) -> pl.BlockSpec:
        """Cut a value per token whose tokens lie in the lanes, [B, NT, blocks, heads, C] or [B, NT, HV, 1, C]."""
        index = lambda b, h, grid_step, *tables: (b, self._chunk(grid_step, tables), h, 0, 0)
        return pl.BlockSpec((None, *block), index)

    def owner(self, lanes: int) -> pl.BlockSpec:
        """Cut the owners of tokens [B * NT, 1, lanes]."""
        index = lambda b, h, grid_step, *_: (b * self.spans + self.at(grid_step), 0, 0)
        return pl.BlockSpec((self.chunks, 1, lanes), index)

    def state(self, *tail: int) -> pl.BlockSpec:
        """Cut the state of the sequence, or the slot to read, of [N, HV, ...]; `tail` is (heads of a block, ...)."""
        return self._by_table(chunk_spans.SEQUENCE, tail) if self.varlen else self.per_row(*tail)

    def target(self, *tail: int) -> pl.BlockSpec:
        """Cut the slot to write of a pool [slots, HV, ...]."""
        return self._by_table(chunk_spans.TARGET, tail)

    def _by_table(self, row: int, tail: tuple[int, ...]) -> pl.BlockSpec:
        def index(b, h, grid_step, table, *_):
            return table[row, self.at(grid_step)], h, *(0 for _ in tail[1:])

        return pl.BlockSpec((None, *tail), index)

    def unread(self, x: jax.Array) -> pl.BlockSpec:
        """Cut always the same block, which nobody reads, of flat tokens x [B, T, all lanes]."""
        return windows.along((None, 16, min(packed.LANES, x.shape[2])))

    def per_row(self, *tail: int | None) -> pl.BlockSpec:
        """Cut an array with one entry for every row of the batch, [B, HV, ...]; `tail` is (heads of a block, ...)."""
        return windows.along((None, *tail), 0, 1)

    def per_chunk(self, *tail: int) -> pl.BlockSpec:
        """Cut an array with one entry for every chunk, or piece, [B, NT, all, ...]; `tail` is as in `per_span`.

        A block of several chunks has an axis for them.
        """
        return self._by_span(None if self.chunks == 1 else self.chunks, tail)

    def per_span(self, *tail: int) -> pl.BlockSpec:
        """Cut an array with one entry for every span, [B, spans, all, ...]; `tail` is (how many a block has, ...)."""
        return self._by_span(None, tail)

    def _by_span(self, entries: int | None, tail: tuple[int, ...]) -> pl.BlockSpec:
        def index(b, h, grid_step, *_):
            return b, self.at(grid_step), h, *(0 for _ in tail[1:])

        return pl.BlockSpec((None, entries, *tail), index)
