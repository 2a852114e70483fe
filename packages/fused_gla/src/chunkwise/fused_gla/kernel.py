"""Forward in one launch: what both directions share, kernel body, launcher.

Operands are the user's arrays seen flat, [B, T, heads * lanes]: a head is a slice of whole lanes. Time is the last,
sequential axis of the grid and the state lives in VMEM across it. The state layout is not the user's [K, V]: kernels
keep states as [V, K], so that a decay per channel is a row.

A packed batch keeps its chunks aligned to the token stream. Without states in or out, masks keep the sequences of a
chunk apart, as they do in rows of segments; only mixed chunks, of several sequences or with padding, compute with them.
With states a grid step is a piece of a block of chunks: the tokens of one sequence in it. So every sequence has a
boundary where its state comes in or goes out, and only chunks that are not wholly of the piece select rows.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from chunkwise.fused_gla import config, cost, tile
from chunkwise.shared import compat
from chunkwise.shared.kernels import launcher, layout, matmul, nonfinite, pools, tiles
from chunkwise.shared.kernels.operands import Operands


class Static(NamedTuple):
    """What is known of a launch when its program is built.

    Attributes:
      B, T: rows of the batch and tokens.
      H, HV: heads of q and k, and of v: value head n reads key head n // (HV // H).
      K, V: lanes of a head, padded to whole vectors.
      C: tokens of a chunk.
      N: sequences, and states.
      steps: grid steps that a row of the batch takes.
      chunks: chunks of a grid step.
      scale: multiplies the output.
      config: heads of a grid step, forward and backward.
      per_channel: the gates are per channel of the key.
      pieces: packed sequences have states of their own: a grid step is a piece of its chunks, of one sequence.
      constant: every chunk has the same decays: constant gates, whole chunks, one sequence.
      parts: parts of computed tiles in bfloat16 products: two where the gradient of constant gates is wanted.
    """

    B: int
    T: int
    H: int
    HV: int
    K: int
    V: int
    C: int
    N: int
    steps: int
    chunks: int
    scale: float
    config: config.Config
    per_channel: bool
    pieces: bool
    constant: bool
    parts: int = 1


class Blocks:
    """The BlockSpecs of a launch over the grid (row of the batch, block of heads, step); `time` maps the last index.

    These are not the `Blocks` of shared, which cut one chunk a step: a chunk of gated linear attention is so little
    work that the cost of a grid step shows, so a step here takes several.
    """

    def __init__(self, s: Static, heads: int, time):
        self.s, self.heads, self.time = s, heads, time
        self.grid = s.B, s.HV // heads, s.steps
        group = s.HV // s.H
        # Key heads of a block; or if a group is larger than a block, how many blocks share its one key head.
        self.keys, self.share = max(heads // group, 1), max(group // heads, 1)

    def _tokens(self, t, tables):
        """Return the block of tokens of a grid step."""
        return tables[0][layout.CHUNK, self.time(t)] if self.s.pieces else self.time(t)

    def queries(self) -> pl.BlockSpec:
        """Cut flat queries or keys [B, T, H * K]."""
        block, share = (None, self.s.chunks * self.s.C, self.keys * self.s.K), self.share
        return pl.BlockSpec(
            block,
            lambda b, h, t, *tables: (b, self._tokens(t, tables), h if share == 1 else lax.div(h, jnp.int32(share))),
        )

    def query_sums(self) -> pl.BlockSpec:
        """Cut what every block has of the gradients of queries or keys, [B, T, H * share * K]."""
        block = (None, self.s.chunks * self.s.C, self.keys * self.s.K)
        return pl.BlockSpec(block, lambda b, h, t, *tables: (b, self._tokens(t, tables), h))

    def tokens(self, D: int) -> pl.BlockSpec:
        """Cut flat tokens [B, T, HV * D]."""
        block = (None, self.s.chunks * self.s.C, self.heads * D)
        return pl.BlockSpec(block, lambda b, h, t, *tables: (b, self._tokens(t, tables), h))

    def rows(self) -> pl.BlockSpec:
        """Cut values per token [B, NT, HV, 1, C]."""
        block = (None, self.s.chunks, self.heads, 1, self.s.C)
        return pl.BlockSpec(block, lambda b, h, t, *tables: (b, self._tokens(t, tables), h, 0, 0))

    def owners(self) -> pl.BlockSpec:
        """Cut the `coded_owners` of tokens [B * NT, 1, C]."""
        index = lambda b, h, t, *_: (b * jnp.int32(self.s.steps) + self.time(t), 0, 0)
        return pl.BlockSpec((self.s.chunks, 1, self.s.C), index)

    def gates(self) -> pl.BlockSpec:
        """Cut the gates, as rows or by channel."""
        return self.tokens(self.s.K) if self.s.per_channel else self.rows()

    def per_head(self, *tail: int) -> pl.BlockSpec:
        """Cut one tile for every head and row of the batch, [B, HV, *tail]."""
        return pl.BlockSpec((None, self.heads, *tail), lambda b, h, t, *_: (b, h, 0, 0))

    def per_sequence(self, *tail: int) -> pl.BlockSpec:
        """Cut one tile for every head and sequence, [N, HV, *tail]."""
        return self.slots(layout.SEQUENCE, *tail) if self.s.pieces else self.per_head(*tail)

    def states(self) -> pl.BlockSpec:
        """Cut states of sequences [N, HV, V, K]."""
        return self.per_sequence(self.s.V, self.s.K)

    def slots(self, row: int, *tail: int) -> pl.BlockSpec:
        """Cut the slots of a pool [slots, HV, *tail] that a row of the table names."""
        block = (None, self.heads, *tail)
        return pl.BlockSpec(block, lambda b, h, t, table: (table[row, self.time(t)], h, 0, 0))

    def kept(self) -> pl.BlockSpec:
        """Cut the state before every grid step, [B, steps, HV, V, K]."""
        block = (None, None, self.heads, self.s.V, self.s.K)
        return pl.BlockSpec(block, lambda b, h, t, *_: (b, self.time(t), h, 0, 0))

    def operands(self, x: Operands, queries: bool) -> list[pl.BlockSpec | None]:
        """Cut all operands but those that tell sequences; without `queries`, of q only one block that nobody reads."""
        C = self.s.C
        return [
            self.queries() if queries else pl.BlockSpec((None, 16, 128), lambda *_: (0, 0, 0)),
            self.queries(),
            self.tokens(self.s.V),
            None if x.g is None else self.gates(),
            None if x.gamma is None else pl.BlockSpec((self.heads, 1, C), lambda b, h, t, *_: (h, 0, 0)),
            None if x.initial_state is None else self.states(),
            None if x.owner is None else self.owners(),
        ]


# How sequences lie in chunks: the tables in scalar memory; and what is read like an operand.
TABLES = ("before", "last", "mixed")
NAMES = ("q", "k", "v", "g", "gamma", "initial_state", "owner")


def make_tables(s: Static, x: Operands) -> dict[str, jax.Array]:
    """Return the tables in scalar memory, by name: how the sequences lie in the chunks.

    For pieces it is the table of steps, which `Step` reads. Where a chunk may hold several sequences the tables
    [B * NT] hold for every chunk the sequence of the token before it, that of its last token, and whether it is mixed.
    """
    if s.pieces:
        return {"table": x.table}
    if x.owner is None:
        return {}
    rows = (layout.BEFORE, layout.FINAL, layout.MIXED)
    return {name: x.table[row] for name, row in zip(TABLES, rows, strict=True)}


def run_kernel(
    body, s: Static, blocks: Blocks, x: Operands, outputs, scratch, more=(), queries=True, in_place=None, **call
):
    """Launch a kernel whose body is called with its Refs by name, and with s; return its results, None for unwanted.

    Args:
      body: the body.
      s, x: static sizes and operands.
      blocks: how they are cut.
      outputs: (name, spec, type) for every result; the type of an unwanted one is None.
      scratch: (name, type) for every scratch buffer.
      more: (name, spec, array) for every operand after those in x.
      queries: whether the kernel reads q. It stays an operand if not, so that vmap over q alone gives every result
        its axis.
      in_place: the name of an operand and that of the output that takes its memory, or None.
      **call: as in `pallas_call`.
    """
    tables = make_tables(s, x)
    # Gates per channel are clipped where a kernel loads them: a pass over them in HBM would cost time.
    g = x.g if x.g is None or s.per_channel else tiles.clip_gate(x.g)
    # Whole rows: a single number would be broadcast over the lanes at every use.
    gamma = None if x.gamma is None else jnp.broadcast_to(tiles.clip_gate(x.gamma), (s.HV, 1, s.C))
    names = *tables, *NAMES, *(name for name, *_ in more)
    wanted = [(name, shape is not None) for name, _, shape in outputs]
    kernel = launcher.named(body, names, wanted, [name for name, _ in scratch], s=s)

    operands = *tables.values(), x.q, x.k, x.v, g, gamma, x.initial_state, x.owner, *(y for *_, y in more)
    read = [name for name, y in zip(names, operands, strict=True) if y is not None]
    written = [name for name, present in wanted if present]
    aliases = {} if in_place is None else {read.index(in_place[0]): written.index(in_place[1])}
    results = iter(launcher.pallas_call(
        kernel, *operands,
        num_scalar_prefetch=len(tables),
        grid=blocks.grid,
        # Rows of the batch and blocks of heads are independent; time carries the state.
        dimension_semantics=("parallel", "parallel", "arbitrary"),
        in_specs=[*blocks.operands(x, queries), *(spec if y is not None else None for _, spec, y in more)],
        out_specs=[spec for _, spec, shape in outputs if shape is not None],
        out_shape=[shape for *_, shape in outputs if shape is not None],
        scratch_shapes=[buffer for _, buffer in scratch],
        input_output_aliases=aliases,
        in_bounds=in_place is None,  # nothing but the slots of a pool comes from the caller's numbers
        **call,
    ))  # fmt: skip
    return tuple(next(results) if present else None for _, present in wanted)


class GridStep(NamedTuple):
    """A step of the grid: the row of the batch, the step of that row, and the piece of its chunks that it takes."""

    row: jax.Array
    step: jax.Array
    # Whether it is None is known from the launch.
    piece: Any

    def chunk(self, s: Static, i) -> jax.Array:
        """Return which chunk of the row chunk i of the step is; not for pieces."""
        return self.step * jnp.int32(s.chunks) + i

    def in_tables(self, s: Static, i) -> jax.Array:
        """Return which chunk of all rows that is."""
        return self.row * jnp.int32(s.steps * s.chunks) + self.chunk(s, i)

    def chunks(self, s: Static) -> tuple[jax.Array, jax.Array]:
        """Return the range of the chunks of the step."""
        if self.piece is not None:
            begin, end = self.piece.begin, self.piece.end
            first, last = (lax.shift_right_logical(n, jnp.int32(s.C.bit_length() - 1)) for n in (begin, end - 1))
            # A piece without rows may begin where its chunks end. Boundaries may be wrong, and pass that too.
            first = jnp.minimum(first, jnp.int32(s.chunks - 1))
            return first, jnp.where(begin < end, jnp.minimum(last + 1, jnp.int32(s.chunks)), first)
        # Always `s.chunks`, but XLA cannot tell. It would inline a loop of one trip into other code when it interprets
        # the kernel, and round that differently.
        most = jnp.int32(s.chunks * s.steps) - self.step * jnp.int32(s.chunks)
        return jnp.int32(0), jnp.minimum(jnp.int32(s.chunks), most)


def grid_step(s: Static, refs, step) -> GridStep:
    """Return the step of the grid with this number in its row of the batch."""
    return GridStep(pl.program_id(0), step, layout.Step(refs.table, step) if s.pieces else None)


def run_chunk(s: Static, refs, at: GridStep, i, run: Callable[[bool | None], None]) -> None:
    """Run chunk i of a grid step, with masks or a selection of rows only where they are needed.

    `run` gets True where the chunk is mixed, False where all its rows are of one sequence and of the step, and None
    where some may not be and no chunk of the launch is mixed.
    """
    if at.piece is not None:
        begin, end = i * jnp.int32(s.C), (i + 1) * jnp.int32(s.C)
        cut = (at.piece.begin > begin) | (at.piece.end < end)
        nonfinite.masked_or_not(cut, lambda cut: run(None if cut else False))
    else:
        nonfinite.masked_or_not(refs.mixed[at.in_tables(s, i)] == 1 if hasattr(refs, "mixed") else None, run)


class Place:
    """How chunk i of a grid step lies in the batch, inside a kernel.

    In a chunk that is not mixed all tokens are of one sequence. Else the state before the chunk acts on the tokens of
    the sequence that is open there, the state after it belongs to the last one, and the first passes into the second if
    the two are one. A piece has only tokens of one sequence, and those of the chunk that are not its own load as zeros.

    A sequence with something that is not finite must not reach the others of its chunk, and a product reads every row.
    So in mixed chunks such a sequence is taken for padding, whose rows load as zeros; `spoil_tokens` and `spoil_state`
    then store NaN in its results.

    Attributes:
      at: rows of the chunk in a block of tokens.
      masks: as `SequenceMasks`; None if the chunk is not mixed.
      own: bool [1, C, 1], tokens of a sequence; None if all are. Other rows may hold anything.
      own_row: bool [1, 1, C], the same as a row.
    """

    def __init__(self, s: Static, refs, at: GridStep, i, masked: bool | None, inputs=(), states=()):
        """Find the place of the chunk.

        Args:
          s, refs: of the kernel.
          at, i: grid step and chunk.
          masked: as `run_chunk` says it.
          inputs: pairs (name of a Ref of tokens, lanes of a head) that must be finite, beside the gates.
          states: Refs [heads, V, K] of the state before the chunk, and of the gradient of the one after it, or None.
            Zeros replace them if they are not finite and another sequence could meet them.
        """
        self.s, self.refs, self.i = s, refs, i
        self.at = pl.ds(pl.multiple_of(i * jnp.int32(s.C), s.C), s.C)
        self.masks: Any = None
        self.own: Any = None
        self.own_row: Any = None
        if masked is not None and not s.pieces:
            self.before, self.last = (table[at.in_tables(s, i)] for table in (refs.before, refs.last))
        if masked:
            owner = refs.owner[i][None]  # [1, 1, C]
            masks = layout.sequence_masks(owner[0], s.C, self.before, self.last)
            found = self._quarantine(masks, inputs, states)  # [1, C, 1]
            self.found = tiles.to_row(found)  # [1, 1, C]
            self.masks = masks._replace(code=as_padding(masks.code, found))
            self.own, self.own_row = self.masks.code >= 0, as_padding(owner, self.found) >= 0
        elif masked is None and (s.pieces or s.T % s.C):
            begin, end = jnp.int32(0), jnp.int32(s.T)
            first = at.chunk(s, i) * jnp.int32(s.C)
            if at.piece is not None:
                begin, end, first = at.piece.begin, at.piece.end, i * jnp.int32(s.C)
            token, in_row = (
                first + lax.broadcasted_iota(jnp.int32, (1, *x), axis) for x, axis in (((s.C, 1), 1), ((1, s.C), 2))
            )
            self.own, self.own_row = ((x >= begin) & (x < end) for x in (token, in_row))

    def _quarantine(self, masks: layout.SequenceMasks, inputs, states) -> jax.Array:
        """Return the tokens of spoilt sequences, with the padding that counts to them, float32 [1, C, 1]."""
        s, refs = self.s, self.refs
        found = nonfinite.rows_not_finite(
            *(layout.load_heads(getattr(refs, name), D, at=self.at) for name, D in inputs)
        )  # [1, C, 1]
        if refs.g is not None and s.per_channel:
            gates = tiles.clip_gate(layout.load_heads(refs.g, s.K, at=self.at))  # [heads, C, K]
            found = jnp.maximum(found, nonfinite.rows_not_finite(gates))
        elif refs.g is not None:
            # Zero times a gate is zero if it is finite, else NaN, which no comparison likes.
            zero = jnp.sum(refs.g[self.i] * 0.0, axis=0, keepdims=True)  # [1, 1, C]
            found = jnp.maximum(found, tiles.to_column(1.0 - (zero == 0.0).astype(jnp.float32)))
        found = jnp.where(masks.code >= 0, found, 0.0)
        for ref, touched in zip(states, (masks.carried, masks.ending), strict=False):
            if ref is None:
                continue
            bad = nonfinite.not_finite(ref[...])  # [1, 1, 1]
            found = jnp.maximum(found, jnp.where(touched, bad, 0.0))
            pl.when(jnp.max(bad) > 0.0)(functools.partial(layout.clear, ref))
        return nonfinite.whole_sequences(found, masks.same)

    def spoil_tokens(self, *refs) -> None:
        """Store NaN in the tokens of spoilt sequences, in blocks of tokens or of rows per head; None is passed over."""
        if self.masks is None:
            return

        @pl.when(jnp.max(self.found) > 0.0)
        def _():
            row = jnp.where(self.refs.owner[self.i][None] >= 0, self.found, 0.0)  # [1, 1, C]
            for ref in refs:
                if ref is not None and len(ref.shape) == 2:
                    nonfinite.spoil(ref.at[self.at], tiles.to_column(row))
                elif ref is not None:
                    ref[self.i] = jnp.where(row > 0.0, jnp.nan, ref[self.i])

    def spoil_state(self, ref, n) -> None:
        """Store NaN in the states of sequence n if it is a spoilt one."""
        if self.masks is None:
            return
        found = jnp.where(layout.decoded(self.refs.owner[self.i][None]) == n, self.found, 0.0)

        @pl.when(jnp.max(found) > 0.0)
        def _():
            ref[...] = jnp.full(ref.shape, jnp.nan, ref.dtype)

    def load(self, ref, D: int, heads: slice = slice(None)) -> jax.Array:
        """Return tokens as tiles [heads, C, D]; rows that are not own become zeros."""
        return layout.load_heads(ref, D, heads, None if self.own is None else self.own[0], self.at)

    def keys(self, heads: slice) -> slice:
        """Return the key heads of some value heads of the block."""
        group = self.refs.v.shape[1] // self.s.V // (self.refs.k.shape[1] // self.s.K)
        return slice(heads.start // group, -(-heads.stop // group))

    def store(self, ref, x: jax.Array, heads: slice) -> None:
        """Write tiles [heads, C, D] to the tokens of the chunk, or of the piece in it."""
        own = self.own[0] if self.s.pieces and self.own is not None else None
        layout.store_heads(ref, x, own, first=heads.start, at=self.at)

    def store_gates(self, ref, x: jax.Array, heads: slice) -> None:
        """Write what is shaped like the gates to the tokens of the chunk, or of the piece in it; zeros for padding."""
        if self.s.per_channel:
            self.store(ref, _select(self.own, x), heads)
        elif self.s.pieces and self.own is not None:
            ref[self.i, heads] = jnp.where(self.own_row, x, ref[self.i, heads])
        else:
            ref[self.i, heads] = _select(self.own_row, x)

    def gates(self, heads: slice) -> jax.Array:
        """Return all gates of the chunk, [heads, 1, C] or [heads, C, K], zeros where no own token is."""
        s, refs = self.s, self.refs
        if s.per_channel:
            g = tiles.clip_gate(self.load(refs.g, s.K, heads))  # [heads, C, K]
            return g if refs.gamma is None else g + _select(self.own, refs.gamma[heads, :, :1])
        g = jnp.zeros((heads.stop - heads.start, 1, s.C), jnp.float32)
        g = g if refs.g is None else g + refs.g[self.i, heads]
        g = g if refs.gamma is None else g + refs.gamma[heads]
        return _select(self.own_row, g)

    def gate_parts(self, g: jax.Array) -> tuple[jax.Array, ...] | None:
        """Return bfloat16 tiles that add up to the gates per channel, exactly; None for gates per head."""
        if not self.s.per_channel:
            return None
        # Gates that come in bfloat16 are one part, clipped or not.
        return matmul.bf16_parts(g, 1 if self.refs.g.dtype == jnp.bfloat16 and self.refs.gamma is None else 3)


def as_padding(code: jax.Array, found: jax.Array) -> jax.Array:
    """Return `coded_owners` with the tokens that are found, 1 and 0 of the same shape, marked as padding."""
    return jnp.where(found > 0.0, jnp.minimum(code, ~code), code)


def _select(mask: jax.Array | None, x: jax.Array) -> jax.Array:
    return x if mask is None else jnp.where(mask, x, 0.0)


class Chunk:
    """Tiles of a chunk, some or all of its heads.

    Attributes:
      q, k: tiles [key heads, C, K] in the type in which they enter products; q only if `queries`.
      v: tiles [heads, C, V], likewise.
      g: gates [heads, 1, C] or [heads, C, K]; not if the decays are given.
      decays: as `tile.Decays`.
    """

    def __init__(self, place: Place, heads: slice, decays: tile.Decays | None = None, queries=True):
        s, refs = place.s, place.refs
        self.place, self.heads = place, heads
        self.dtype = matmul.operand_dtype(refs.q.dtype, refs.k.dtype, refs.v.dtype)
        self.k = place.load(refs.k, s.K, place.keys(heads)).astype(self.dtype)  # [key heads, C, K]
        self.v = place.load(refs.v, s.V, heads).astype(self.dtype)  # [heads, C, V]
        if queries:
            self.q = place.load(refs.q, s.K, place.keys(heads)).astype(self.dtype)  # [key heads, C, K]
        if decays is None:
            self.g = place.gates(heads)
            same = None if place.masks is None else place.masks.same
            decays = tile.decays(self.g, s.scale, same, queries, place.gate_parts(self.g))
        self.decays = decays

    @property
    def same(self) -> Any:
        """Pairs of one sequence, bool [1, C, C]; None if all tokens are of one."""
        return None if self.place.masks is None else self.place.masks.same

    def from_start(self) -> jax.Array:
        """Return the decay from the state before the chunk to each token that it acts on."""
        x, masks = self.decays.from_start, self.place.masks
        return x if masks is None else jnp.where(masks.carried, x, 0.0)

    def to_end(self) -> jax.Array:
        """Return the decay from each token that acts on the state after the chunk to that state."""
        x, masks = self.decays.to_end, self.place.masks
        return x if masks is None else jnp.where(masks.ending, x, 0.0)

    def through(self) -> jax.Array:
        """Return the decay of the state over the chunk."""
        x, masks = self.decays.through, self.place.masks
        return x if masks is None else jnp.where(masks.through, x, 0.0)


def constant_decays(s: Static, refs, heads: int) -> tile.Decays:
    """Return the decays of every chunk if `s.constant` says that they are the same for all."""
    # The maximum of equal lanes: a reduction leaves its result in every lane, a slice is broadcast at every use.
    gamma = jnp.zeros((heads, 1, s.C), jnp.float32) if refs.gamma is None else refs.gamma[...]
    gamma = jnp.max(gamma, axis=2, keepdims=True)  # [heads, 1, 1]
    return tile.constant_decays(gamma, s.scale, s.C)


def _gla_fwd_kernel(refs, s: Static):
    """Take the state through the chunks of a grid step.

    A final state that is wanted is the state itself: its block stays where it is until another sequence begins.
    """
    at = grid_step(s, refs, pl.program_id(2))
    piece: Any = at.piece
    S_ref = refs.S if refs.ht is None else refs.ht
    heads = slice(0, S_ref.shape[0])
    begins = at.step == 0
    if piece is not None:
        begins |= piece.first == 1

    @pl.when(begins)
    def _():
        if refs.pool is not None:
            pools.fetch_states(refs.pool, S_ref, piece.continues, transposed=True)
        else:
            S_ref[...] = jnp.zeros_like(S_ref) if refs.initial_state is None else refs.initial_state[...]
        if refs.M is not None:
            refs.M[...] = jnp.ones_like(refs.M)

    if refs.pool is not None:

        @pl.when((at.step == 0) & (piece.sequence == piece.target))
        def _():
            pools.keep_block(refs.pool, refs.pool_out)

    if piece is not None and refs.o is not None:  # tokens that no piece owns

        @pl.when((piece.opens & piece.mixed) == 1)
        def _():
            layout.clear(refs.o)

    # The backward starts from this state when it recomputes those between the chunks of the step.
    if refs.h is not None:
        refs.h[...] = S_ref[...]
    constant = constant_decays(s, refs, heads.stop) if s.constant else None
    inputs = [("q", s.K)] * (refs.o is not None) + [("k", s.K), ("v", s.V)]

    def chunk(i, masked):
        place = Place(s, refs, at, i, masked, inputs, states=(S_ref,))
        c = Chunk(place, heads, constant, queries=refs.o is not None)
        S, through = S_ref[...], c.through()  # [heads, V, K], [heads, 1, K] or [heads, 1, 1]
        S_ref[...] = tile.next_state(S, c.k, c.v, c.to_end(), through, s.parts)
        place.spoil_state(S_ref, place.last if masked else None)
        if refs.M is not None:
            refs.M[...] *= through
        if refs.o is not None:
            # What the tokens of the chunk give to one another, and what the state before it does.
            P = tile.scores(c.q, c.k, c.decays, c.same)  # [heads, C, C]
            o = matmul.dot(P.astype(c.v.dtype), c.v) + tile.read_state(c.q, S, c.from_start())  # [heads, C, V]
            place.store(refs.o, o, heads)
        place.spoil_tokens(refs.o)

    def turn(i, _):
        run_chunk(s, refs, at, i, functools.partial(chunk, i))

    lax.fori_loop(*at.chunks(s), turn, None)
    if refs.pool is not None:

        @pl.when(piece.last == 1)
        def _():
            pools.put_states(S_ref, refs.pool_out, transposed=True)


def varlen(s: Static, x: Operands) -> str:
    """Return the end of the name of a launch, which says whether chunks are cut or may hold several sequences."""
    return "_varlen" if s.pieces or x.owner is not None else ""


def launch(x: Operands, s: Static, outputs: tuple[str, ...]) -> dict[str, Any]:
    """Run the forward, or the part of it that makes these outputs.

    Args:
      x, s: operands and static sizes.
      outputs: names.

    Returns:
      A dict of the outputs: o [B, T, HV * V]; ht, the final states [N, HV, V, K] float32; h, the state before every
      grid step [B, steps, HV, V, K] float32; M, the decay of a state over all tokens of its sequence [N, HV, 1, K]
      float32, of gates per channel only; pool_out, the pool, updated in place.
    """
    blocks = Blocks(s, s.config.heads, lambda t: t)
    state, decays = (s.HV, s.V, s.K), (s.N, s.HV, 1, s.K)
    inputs = [y for y in x if y is not None]
    kind = "fwd" if "o" in outputs else "states" if "h" in outputs else "summary"
    tail, pool = ((), None) if x.pool is None else (x.pool.shape[2:], x.pool)
    kinds = [
        ("o", blocks.tokens(s.V), x.v),
        ("ht", blocks.states(), jax.ShapeDtypeStruct((s.N, *state), jnp.float32)),
        ("h", blocks.kept(), jax.ShapeDtypeStruct((s.B, s.steps, *state), jnp.float32)),
        ("M", blocks.per_sequence(1, s.K), jax.ShapeDtypeStruct(decays, jnp.float32)),
        ("pool_out", blocks.slots(layout.TARGET, *tail), pool),
    ]
    results = run_kernel(
        _gla_fwd_kernel, s, blocks, x, queries="o" in outputs,
        name=f"chunk_gla_{kind}_c{s.C}" + varlen(s, x),
        outputs=[
            (name, spec, compat.out_struct(y.shape, y.dtype, *inputs) if name in outputs else None)
            for name, spec, y in kinds
        ],
        more=[("pool", blocks.slots(layout.SEQUENCE, *tail), x.pool)],
        in_place=("pool", "pool_out") if x.pool is not None else None,
        # The state, unless an output holds it.
        scratch=[] if "ht" in outputs else [("S", pltpu.VMEM((blocks.heads, s.V, s.K), jnp.float32))],
        cost_estimate=cost.cost(
            B=s.B, T=s.T, H=s.H, HV=s.HV, K=s.K, V=s.V, C=s.C, itemsize=x.v.dtype.itemsize,
            per_channel=s.per_channel, output="o" in outputs,
        ),
    )  # fmt: skip
    return {name: y for (name, *_), y in zip(kinds, results, strict=True) if name in outputs}
