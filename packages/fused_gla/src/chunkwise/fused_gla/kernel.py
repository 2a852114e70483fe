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
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from chunkwise.fused_gla import cost, tile
from chunkwise.shared.kernels import chunk_loop, launcher, layout, matmul, nonfinite, tiles
from chunkwise.shared.kernels.operands import FusedStatic, Operands


class GlaFwdRefs(NamedTuple):
    """The Refs of the forward, and of the launch for the gradient of the initial states alone.

    None for what a launch lacks. A block has rows = chunks * C tokens and heads value heads; keys are their key heads.
    """

    k: jax.Ref  # [rows, keys K]
    v: jax.Ref  # [rows, heads V]
    table: jax.Ref  # int32 [11 or 13, B * steps]; none for plain rows
    q: jax.Ref  # [rows, keys K]
    g: jax.Ref  # [chunks, heads, 1, C], or per channel [rows, heads K]
    gamma: jax.Ref  # [heads, 1, C], only beside gates per head or none
    initial_state: jax.Ref  # [heads, V, K]
    owner: jax.Ref  # int32 [chunks, 1, C]
    pool: jax.Ref  # [heads, K, V], not padded
    unread: jax.Ref  # an operand that is not read
    o: jax.Ref  # [rows, heads V]
    ht: jax.Ref  # [heads, V, K]
    h: jax.Ref  # [heads, V, K]
    M: jax.Ref  # [heads, 1, K]
    pool_out: jax.Ref  # [heads, K, V], not padded
    state: jax.Ref  # float32 [heads, V, K]; ht where that is wanted


def current_step(s: FusedStatic, backwards: bool = False) -> tuple:
    """Return the row of the batch and the step of the row that a grid step takes."""
    # Read outside of loops and branches: an interpreter knows it only there.
    return pl.program_id(0), s.steps - 1 - pl.program_id(2) if backwards else pl.program_id(2)


def varlen_tile_of(refs, s: FusedStatic, step: tuple) -> Any:
    """Return the piece that a step takes, None where steps are not pieces."""
    return layout.TableStep(refs.table, step[1]) if s.varlen else None


def first_chunk(s: FusedStatic, step: tuple):
    """Return which chunk of the row of the batch is the first of a step; not for pieces."""
    return step[1] * jnp.int32(s.chunks)


def chunks_of(refs, s: FusedStatic, step: tuple) -> tuple[jax.Array, jax.Array]:
    """Return the range of the chunks of a step, counted in the step."""
    varlen_tile = varlen_tile_of(refs, s, step)
    if varlen_tile is not None:
        begin, end = varlen_tile.begin, varlen_tile.end
        first, last = (lax.shift_right_logical(n, jnp.int32(s.C.bit_length() - 1)) for n in (begin, end - 1))
        # A piece without rows may begin where its chunks end. Boundaries may be wrong, and pass that too.
        first = jnp.minimum(first, jnp.int32(s.chunks - 1))
        return first, jnp.where(begin < end, jnp.minimum(last + 1, jnp.int32(s.chunks)), first)
    # Always `s.chunks`, but XLA cannot tell. It would inline a loop of one trip into other code when it interprets
    # the kernel, and round that differently.
    most = jnp.int32(s.chunks * s.steps) - first_chunk(s, step)
    return jnp.int32(0), jnp.minimum(jnp.int32(s.chunks), most)


def run_chunk(body: Callable[["Place"], None], refs, s: FusedStatic, step: tuple, i) -> None:
    """Run the body of chunk i of a step with its place, in the variant that the chunk needs."""
    varlen_tile, run = varlen_tile_of(refs, s, step), lambda rows: body(Place(refs, s, step, i, rows))
    ALL, SOME, MIXED = chunk_loop.Rows
    if varlen_tile is not None:
        begin, end = i * jnp.int32(s.C), (i + 1) * jnp.int32(s.C)
        whole = (varlen_tile.begin <= begin) & (varlen_tile.end >= end)
        chunk_loop.either(whole, lambda: run(ALL), lambda: run(SOME))
    elif refs.owner is not None:
        chunk_loop.either(chunk_in_table(refs, s, step, i).mixed == 1, lambda: run(MIXED), lambda: run(ALL))
    else:
        run(SOME if s.partial else ALL)


def chunk_in_table(refs, s: FusedStatic, step: tuple, i) -> layout.TableStep:
    """Return how the sequences lie in chunk i of a step, where a chunk may hold several."""
    return layout.TableStep(refs.table, step[0] * jnp.int32(s.steps * s.chunks) + first_chunk(s, step) + i)


class Place:
    """Where chunk i of a step lies, inside a kernel, and which of its tokens count.

    In a chunk that is not mixed all tokens are of one sequence. Else the state before the chunk acts on the tokens of
    the sequence that is open there, the state after it belongs to the last one, and the first passes into the second if
    the two are one. A piece has only tokens of one sequence, and the others of the chunk load as zeros.

    Attributes:
      rows_at: the rows of the chunk in a block of tokens.
      masks: as `SequenceMasks`; None if the chunk is not mixed.
      valid: bool [1, C, 1], tokens of a sequence; None if all are. Other rows may hold anything.
      valid_row: bool [1, 1, C], the same as a row.
    """

    def __init__(self, refs, s: FusedStatic, step: tuple, i, rows: chunk_loop.Rows):
        """Find the place of chunk i of a step, of which these rows are valid."""
        self.refs, self.s, self.i = refs, s, i
        self.rows_at = pl.ds(pl.multiple_of(i * jnp.int32(s.C), s.C), s.C)
        self.masks: layout.SequenceMasks | None = None
        self.valid: jax.Array | None = None
        self.valid_row: Any = None
        if rows is chunk_loop.Rows.MIXED:
            of_chunk = chunk_in_table(refs, s, step, i)
            self.masks = layout.sequence_masks(refs.owner[i], s.C, of_chunk.before, of_chunk.final)
        elif rows is chunk_loop.Rows.SOME:
            begin, end, varlen_tile = jnp.int32(0), jnp.int32(s.T), varlen_tile_of(refs, s, step)
            first = i * jnp.int32(s.C)
            if varlen_tile is not None:
                begin, end = varlen_tile.begin, varlen_tile.end
            else:
                first += first_chunk(s, step) * jnp.int32(s.C)
            column, row = (lax.broadcasted_iota(jnp.int32, (1, *x), n) for n, x in ((1, (s.C, 1)), (2, (1, s.C))))
            self.valid, self.valid_row = ((first + x >= begin) & (first + x < end) for x in (column, row))

    def isolate(self, inputs: Sequence[tuple], *states: tuple) -> None:
        """Keep the sequences of a mixed chunk apart that are not finite.

        Args:
          inputs: Refs of tokens that must be finite, beside the gates, with the lanes of a head.
          *states: Refs of the state before the chunk or of its gradient after the chunk, with `carried` or `ending`.
        """
        if self.masks is None:
            return
        looked_at = ((*state, slice(None)) for state in states)
        valid, self.nonfinite_rows = nonfinite.isolate(self.masks, lambda: self._not_finite(inputs), *looked_at)
        self.valid = valid[None]
        owner = self.refs.owner[self.i][None]  # [1, 1, C]
        self.valid_row = (owner >= 0) & (tiles.to_row(self.nonfinite_rows) == 0.0)

    def _not_finite(self, inputs: Sequence[tuple]) -> jax.Array:
        """Return which tokens are not finite, float32 [1, C, 1]."""
        s, g = self.s, self.refs.g
        heads = [layout.load_heads(ref, D, at=self.rows_at) for ref, D in inputs]
        if g is not None and s.per_channel:
            heads.append(tiles.clip_gate(layout.load_heads(g, s.K, at=self.rows_at)))  # [heads, C, K]
        rows = nonfinite.rows_not_finite(*heads)  # [1, C, 1]
        if g is None or s.per_channel:
            return rows
        # Zero times a gate is zero if it is finite, else NaN, which no comparison likes.
        zero = jnp.sum(g[self.i] * 0.0, axis=0, keepdims=True)  # [1, 1, C]
        return jnp.maximum(rows, tiles.to_column(1.0 - (zero == 0.0).astype(jnp.float32)))

    def poison(self, results: Sequence, *states: tuple) -> None:
        """Store NaN in results of sequences that are not finite: Refs of tokens, or of rows per head, and states."""
        if self.masks is None:
            return
        refs = [ref for ref in results if ref is not None]
        tokens = [ref.at[self.rows_at] for ref in refs if len(ref.shape) == 2]
        rows = [ref.at[self.i] for ref in refs if len(ref.shape) == 4]
        nonfinite.poison(self.nonfinite_rows, self.masks, tokens, *states, in_lanes=rows)

    @property
    def same(self) -> Any:
        """Pairs of one sequence, bool [1, C, C]; None if all tokens are of one."""
        return None if self.masks is None else self.masks.same

    @property
    def carried(self) -> Any:
        """Rows of the sequence that is open where the chunk begins, bool [1, C, 1]; None if all tokens are of one."""
        return None if self.masks is None else self.masks.carried

    @property
    def ending(self) -> Any:
        """Rows of the sequence that is open where the chunk ends, bool [1, C, 1]; None if all tokens are of one."""
        return None if self.masks is None else self.masks.ending

    def load(self, ref, D: int, heads: slice = slice(None)) -> jax.Array:
        """Return tokens as tiles [heads, C, D]; rows that are not valid become zeros."""
        return layout.load_heads(ref, D, heads, None if self.valid is None else self.valid[0], self.rows_at)

    def keys(self, heads: slice) -> slice:
        """Return the key heads of some value heads of the block."""
        group = self.refs.v.shape[1] // self.s.V // (self.refs.k.shape[1] // self.s.K)
        return slice(heads.start // group, -(-heads.stop // group))

    def store(self, ref, x: jax.Array, heads: slice) -> None:
        """Write tiles [heads, C, D] to the tokens of the chunk, or of the piece in it."""
        valid = self.valid[0] if self.s.varlen and self.valid is not None else None
        layout.store_heads(ref, x, valid, first=heads.start, at=self.rows_at)

    def store_gates(self, ref, x: jax.Array, heads: slice) -> None:
        """Write what is shaped like the gates to the tokens of the chunk, or of the piece in it; zeros for padding."""
        if self.s.per_channel:
            self.store(ref, _select(self.valid, x), heads)
        elif self.s.varlen and self.valid is not None:
            ref[self.i, heads] = jnp.where(self.valid_row, x, ref[self.i, heads])
        else:
            ref[self.i, heads] = _select(self.valid_row, x)

    def gates(self, heads: slice) -> jax.Array:
        """Return all gates of the chunk, [heads, 1, C] or [heads, C, K], zeros where no token is valid."""
        s, refs = self.s, self.refs
        if s.per_channel:
            return tiles.clip_gate(self.load(refs.g, s.K, heads))  # [heads, C, K]
        g = jnp.zeros((heads.stop - heads.start, 1, s.C), jnp.float32)
        g = g if refs.g is None else g + refs.g[self.i, heads]
        g = g if refs.gamma is None else g + refs.gamma[heads]
        return _select(self.valid_row, g)

    def gate_parts(self, g: jax.Array) -> tuple[jax.Array, ...] | None:
        """Return bfloat16 tiles that add up to the gates per channel, exactly; None for gates per head."""
        if not self.s.per_channel:
            return None
        # Gates that come in bfloat16 are one part, clipped or not.
        return matmul.bf16_parts(g, 1 if self.refs.g.dtype == jnp.bfloat16 else 3)

    def tensors(self, heads: slice) -> tuple[Any, Any, jax.Array]:
        """Return q, k [key heads, C, K] and v [heads, C, V] in the type of products; None for a q that is not read."""
        s, refs, keys = self.s, self.refs, self.keys(heads)
        q_ref = refs.unread if refs.q is None else refs.q
        dtype = matmul.operand_dtype(q_ref.dtype, refs.k.dtype, refs.v.dtype)
        q, k = (None if ref is None else self.load(ref, s.K, keys).astype(dtype) for ref in (refs.q, refs.k))
        return q, k, self.load(refs.v, s.V, heads).astype(dtype)

    def decays(self, heads: slice, constant: tile.GlaDecays | None = None, pairs: bool = True) -> tile.GlaDecays:
        """Return the decays of the chunk, zero between sequences; `constant` if all chunks have the same ones."""
        decays = constant
        if decays is None:
            g = self.gates(heads)
            decays = tile.decays(g, self.s.scale, self.same, pairs, self.gate_parts(g))
        if self.masks is None:
            return decays
        return decays._replace(
            from_start=jnp.where(self.masks.carried, decays.from_start, 0.0),
            to_end=jnp.where(self.masks.ending, decays.to_end, 0.0),
            through=jnp.where(self.masks.through, decays.through, 0.0),
        )


def _select(mask: jax.Array | None, x: jax.Array) -> jax.Array:
    return x if mask is None else jnp.where(mask, x, 0.0)


def constant_decays(refs, s: FusedStatic, heads: int) -> tile.GlaDecays | None:
    """Return the decays of every chunk where they are the same for all, else None."""
    if not s.constant:
        return None
    # The maximum of equal lanes: a reduction leaves its result in every lane, a slice is broadcast at every use.
    gamma = jnp.zeros((heads, 1, s.C), jnp.float32) if refs.gamma is None else refs.gamma[...]
    gamma = jnp.max(gamma, axis=2, keepdims=True)  # [heads, 1, 1]
    return tile.constant_decays(gamma, s.scale, s.C)


def _gla_fwd_kernel(refs: GlaFwdRefs, s: FusedStatic) -> None:
    """Take the state through the chunks of a step."""
    if refs.ht is not None:
        # Its block stays where it is until another sequence begins.
        refs = refs._replace(state=refs.ht)
    step, heads = current_step(s), slice(0, refs.state.shape[0])
    varlen_tile, begins = varlen_tile_of(refs, s, step), step[1] == 0
    if varlen_tile is not None:
        begins |= varlen_tile.first == 1
    if refs.pool is None:
        chunk_loop.start_state(refs.state, refs.initial_state, begins)
    else:
        chunk_loop.read_pool(refs.pool, refs.pool_out, refs.state, varlen_tile, transposed=True)
    if refs.M is not None:
        pl.when(begins)(functools.partial(_set_ones, refs.M))
    if varlen_tile is not None and refs.o is not None:
        chunk_loop.clear_unowned(varlen_tile, (refs.o,))
    # The backward starts from this state when it recomputes those between the chunks of the step.
    if refs.h is not None:
        refs.h[...] = refs.state[...]
    constant = constant_decays(refs, s, heads.stop)
    inputs = [(refs.q, s.K)] * (refs.q is not None) + [(refs.k, s.K), (refs.v, s.V)]

    def chunk(place: Place) -> None:
        place.isolate(inputs, (refs.state, place.carried))
        (q, k, v), decays = place.tensors(heads), place.decays(heads, constant, refs.o is not None)
        S = refs.state[...]  # [heads, V, K]
        refs.state[...] = tile.next_state(S, k, v, decays.to_end, decays.through, s.parts)
        if refs.M is not None:
            refs.M[...] *= decays.through
        if refs.o is not None:
            # What the tokens of the chunk give to one another, and what the state before it does.
            P = tile.scores(q, k, decays, place.same)  # [heads, C, C]
            o = matmul.dot(P.astype(v.dtype), v) + tile.read_state(q, S, decays.from_start)  # [heads, C, V]
            place.store(refs.o, o, heads)
        place.poison((refs.o,), (refs.state, place.ending))

    lax.fori_loop(*chunks_of(refs, s, step), lambda i, _: run_chunk(chunk, refs, s, step, i), None)
    if refs.pool is not None:
        chunk_loop.write_pool(refs.state, refs.pool_out, varlen_tile.last == 1, transposed=True)


def _set_ones(ref) -> None:
    ref[...] = jnp.ones_like(ref)


def inputs_of(x: Operands, s: FusedStatic, cut: layout.Blocks, heads: int, queries: bool) -> dict[str, tuple]:
    """Return the operands of a launch of so many value heads a step by name, each with how it is cut.

    Without `queries` one block of q, which nobody reads, stays an operand: so vmap over q alone gives every result its
    axis.
    """
    keys, share = s.key_blocks(heads)
    key, value = cut.tokens(keys * s.K, share), cut.tokens(heads * s.V)
    gate = cut.tokens(heads * s.K) if s.per_channel else cut.rows(s.chunks, heads, 1, s.C)
    # Gates per channel are clipped where a kernel loads them: a pass over them in HBM would cost time.
    g = x.g if x.g is None or s.per_channel else tiles.clip_gate(x.g)
    # Whole rows: a single number would be broadcast over the lanes at every use.
    gamma = None if x.gamma is None else jnp.broadcast_to(tiles.clip_gate(x.gamma), (s.HV, 1, s.C))
    return {
        "q" if queries else "unread": (x.q, key if queries else cut.unread()),
        "k": (x.k, key),
        "v": (x.v, value),
        "g": (g, gate),
        "gamma": (gamma, pl.BlockSpec((heads, 1, s.C), lambda b, h, *_: (h, 0, 0))),
        "initial_state": (x.initial_state, cut.state(heads, s.V, s.K)),
        "owner": (x.owner, cut.owner(s.C)),
    }


def launched(x: Operands, s: FusedStatic, kind: str, heads: int, **costs: Any) -> dict[str, Any]:
    """Return what `launcher.launch` is told of every launch of this package: name, grid, table and cost."""
    table = x.table if s.varlen or x.owner is not None else None
    return dict(
        name=f"chunk_gla_{kind}_c{s.C}" + ("" if table is None else "_varlen"),
        grid=(s.B, s.HV // heads, s.steps),
        tables={"table": table},
        cost_estimate=cost.cost(**s.sizes(), itemsize=x.v.dtype.itemsize, per_channel=s.per_channel, **costs),
    )  # fmt: skip


def launch(x: Operands, s: FusedStatic, outputs: tuple[str, ...]) -> dict[str, jax.Array]:
    """Run the forward, or the part of it that makes these outputs.

    Args:
      x, s: operands and static sizes.
      outputs: names.

    Returns:
      A dict of the outputs: o [B, T, HV * V]; ht, the final states [N, HV, V, K] float32; h, the state before every
      grid step [B, steps, HV, V, K] float32; M, the decay of a state over all tokens of its sequence [N, HV, 1, K]
      float32, of gates per channel only; pool_out, the pool, updated in place.
    """
    heads, with_output, cut = s.config.heads, "o" in outputs, chunk_loop.blocks(s)
    state = heads, s.V, s.K
    slot = heads, *(() if x.pool is None else x.pool.shape[2:])
    available = {
        "o": (cut.tokens(heads * s.V), x.v.shape, x.v.dtype),
        "ht": (cut.state(*state), (s.N, s.HV, s.V, s.K), jnp.float32),
        "h": (cut.per_step(*state), (s.B, s.steps, s.HV, s.V, s.K), jnp.float32),
        "M": (cut.state(heads, 1, s.K), (s.N, s.HV, 1, s.K), jnp.float32),
    }
    if x.pool is not None:
        available["pool_out"] = cut.target(*slot), x.pool.shape, x.pool.dtype
    kind = "fwd" if with_output else "states" if "h" in outputs else "summary"
    return launcher.launch(
        functools.partial(_gla_fwd_kernel, s=s),
        GlaFwdRefs,
        inputs=inputs_of(x, s, cut, heads, with_output) | {"pool": (x.pool, cut.state(*slot))},
        outputs=available,
        requested=outputs,
        # The state, unless an output holds it.
        scratch={} if "ht" in outputs else {"state": state},
        in_place={} if x.pool is None else {"pool": "pool_out"},
        in_bounds=x.pool is None,  # nothing else comes from the caller's numbers
        **launched(x, s, kind, heads, output=with_output),
    )
