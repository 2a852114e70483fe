"""The work of a grid step around the mathematics of its chunks, in kernels that carry a state from chunk to chunk.

The state stays in fast memory while the grid walks the spans of a row of the batch. A kernel may be a software
pipeline: stage 0 prepares the chunk of a grid step, and a later stage takes the state through the chunk of an earlier
grid step, so that the products of one stage fill the matrix unit while another stage waits.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from chunkwise.shared.kernels.spans import chunk_spans, layout, pools, stage_chunks
from chunkwise.shared.kernels.spans.operands import FusedStatic
from chunkwise.shared.kernels.spans.stage_chunks import Rows, StageChunk


def span_of(grid_step, stage: int, stages: int, spans: int):
    """Return the span that a stage of a pipeline works on: stage 0 had it `stage` grid steps earlier.

    Where a stage has no span, at the beginning and at the end of the grid, it works on its first or its last span. At
    the beginning it computes from scratch memory that holds anything; the same span follows again, and replaces the
    result.
    """
    span = jnp.maximum(grid_step - stage, 0) if stage else grid_step
    return span if stage == stages - 1 else jnp.minimum(span, spans - 1)


def blocks(static: FusedStatic, stage: int = 0, stages: int = 1) -> layout.Blocks:
    """Return how a stage of a pipeline cuts its arrays."""
    at = functools.partial(span_of, stage=stage, stages=stages, spans=static.spans)
    return layout.Blocks(static.C, static.spans, at, static.varlen, static.chunks)


def blocks_backwards(static: FusedStatic) -> layout.Blocks:
    """Return how a kernel that takes the last span first cuts its arrays."""
    return layout.Blocks(static.C, static.spans, lambda t: static.spans - 1 - t, static.varlen, static.chunks)


def current_spans(table_ref, stages: int, static: FusedStatic) -> list[Any]:
    """Return the span of every stage of a pipeline, a `Span` or a `Piece`."""
    grid_step = pl.program_id(2)
    return [_in_table(table_ref, span_of(grid_step, stage, stages, static.spans), static) for stage in range(stages)]


def current_span_backwards(table_ref, static: FusedStatic) -> Any:
    """Return the span of a kernel that takes the last span first."""
    return _in_table(table_ref, static.spans - 1 - pl.program_id(2), static)


def _in_table(table_ref, span, static: FusedStatic) -> Any:
    """Return a span of the current row of the batch; the first chunk of a span of several chunks."""
    if static.varlen:
        return chunk_spans.Piece(table_ref, span, static.C)
    row = 0 if table_ref is None else pl.program_id(0) * (static.spans * static.chunks + 1)
    return chunk_spans.Span(span * static.chunks, static.readable, static.C, table_ref, row)


def ends(span: chunk_spans.Span) -> jax.Array:
    """Return whether a sequence ends with the span of a kernel that takes the last span first."""
    # Scratch memory holds anything at first, and the last span may be one in which no sequence ends.
    return (pl.program_id(2) == 0) | (span.last == 1)


def chunk_range(span: chunk_spans.Span, static: FusedStatic) -> tuple[jax.Array, jax.Array]:
    """Return the range of the chunks that hold rows of a span, counted in the span."""
    chunks = jnp.int32(static.chunks)
    if not static.varlen:
        # This is always `chunks`, but XLA cannot tell. If XLA could tell, it would inline a loop of one trip into other
        # code when it interprets the kernel, and round that code differently.
        return jnp.int32(0), jnp.minimum(chunks, static.chunks * static.spans - span.chunk)
    begin, end = span.begin, span.end
    first, last = (lax.shift_right_logical(n, jnp.int32(static.C.bit_length() - 1)) for n in (begin, end - 1))
    return first, jnp.where(begin < end, jnp.minimum(last + 1, chunks), first)


def run_chunk(
    body: Callable[[StageChunk], None],
    refs: Any,
    span: chunk_spans.Span,
    index: jax.Array,
    static: FusedStatic,
) -> None:
    """Run the body of a chunk of a span of several chunks, in the variant that the chunk needs."""
    span = span.of_chunk(index)
    run = lambda rows: body(stage_chunks.stage_chunk(span, rows, static.C, refs.owner, index))
    run_variant(run, refs, [span], static, filled=True)


def run_chunks(
    body: Callable[[StageChunk], None],
    refs: Any,
    span: chunk_spans.Span,
    static: FusedStatic,
    first: jax.Array,
    end: jax.Array,
    backwards: bool = False,
) -> None:
    """Run the body of the chunks from `first` to `end` of a span, one after the other, or the last one first."""

    def turn(i, _) -> None:
        run_chunk(body, refs, span, first + end - 1 - i if backwards else i, static)

    lax.fori_loop(first, end, turn, None)


def either(condition: jax.Array, run: Callable[[], None], otherwise: Callable[[], None]) -> None:
    """Run one function where the condition holds, and the other one where it does not."""
    pl.when(condition)(run)
    pl.when(jnp.logical_not(condition))(otherwise)


def run_forward(
    refs: Any,
    body: Callable[[Any, StageChunk, StageChunk], None],
    static: FusedStatic,
    *,
    tokens_not_finite: Callable[[], jax.Array],
    values_not_finite: Callable[[], jax.Array],
    part: slice = slice(None),
    transposed: bool,
) -> None:
    """Run a grid step of a forward: stage 0 prepares a chunk, and stage 1 takes the state through the one before.

    Args:
      refs: the Refs of the kernel: table, owner, initial_state, pool, o, v_new_over_beta, ht, pool_out and state; in
        scratch memory owner_prev, and nonfinite_rows, the rows of `prev` that stage 0 found to be not finite.
      body: gets the Refs, whose state is never None, and the chunks of the two stages. It reads the state by
        `load_state`.
      static: the static description of the launch.
      tokens_not_finite, values_not_finite: return which rows are not finite among the rows that stage 0, and stage 1,
        reads.
      part: the part of a head of the state that is searched for NaN and infinity; the rest is finite if this part is.
      transposed: the kernel holds states as [V, K], and the pool holds them as [K, V].
    """
    if refs.ht is not None:
        # The block of the output stays in fast memory until another sequence begins.
        refs = refs._replace(state=refs.ht)
    cur, prev = current_spans(refs.table, 2, static)
    if refs.pool is not None:
        read_pool(refs.pool, refs.pool_out, refs.state, prev, transposed)
    results = refs.o, refs.v_new_over_beta

    def run(rows: Rows) -> None:
        if rows is Rows.MIXED and refs.pool is None:
            start_state(refs.state, refs.initial_state, prev.first == 1)
        chunk = stage_chunks.stage_chunk(cur, rows, static.C, refs.owner)
        chunk = chunk.isolate(tokens_not_finite, stages=2)
        chunk_prev = stage_chunks.stage_chunk(prev, rows, static.C, refs.owner_prev)
        chunk_prev = chunk_prev.isolate(
            lambda: jnp.maximum(refs.nonfinite_rows[...], values_not_finite()),
            (refs.state, chunk_prev.carried, part),
            stages=2,
        )
        body(refs, chunk, chunk_prev)
        chunk_prev.poison(results, (refs.state, chunk_prev.ending))
        if rows is Rows.MIXED:
            refs.nonfinite_rows[...] = chunk.nonfinite_rows
        if refs.owner is not None:
            refs.owner_prev[...] = refs.owner[...]

    run_variant(run, refs, (cur, prev), static, results)
    if refs.pool is not None:
        # The first two grid steps take the state through the same span. The first of them computes from scratch memory
        # in which no chunk was prepared: its state must not reach the slot that the second one reads.
        write_pool(refs.state, refs.pool_out, (prev.last == 1) & (pl.program_id(2) > 0), transposed)


def run_forward_chunks(
    refs: Any,
    body: Callable[[Any, list[list[StageChunk]]], None],
    static: FusedStatic,
    *,
    stages: int,
    transposed: bool,
    tokens_not_finite: Callable[[StageChunk], jax.Array] | None = None,
    values_not_finite: Callable[[StageChunk], jax.Array] | None = None,
) -> None:
    """Run a grid step of a forward that takes several chunks of a row, or of one packed sequence, a grid step.

    Args:
      refs: the Refs of the kernel: table, owner, initial_state, pool, o, ht, pool_out and state; with an owner also
        owner_prev, the owner of the last stage, and in scratch memory nonfinite_rows, for all stages but the last one
        the rows that the first one found to be not finite.
      body: gets the Refs, whose state is ht if there is no other buffer for it, and for every stage the chunks that it
        works on. The last stage takes the state through its chunks, and reads it by `load_state`. Between the first
        and the last one, a stage gets chunks without masks.
      static: the static description of the launch.
      stages: the stages of the pipeline.
      transposed: the kernel holds states as [V, K], and the pool holds them as [K, V].
      tokens_not_finite, values_not_finite: return which rows of a chunk are not finite, as in `run_forward`.
    """
    if refs.state is None:
        # The block of the output stays in fast memory until another sequence begins.
        refs = refs._replace(state=refs.ht)
    spans = current_spans(refs.table, stages, static)
    if refs.pool is not None:
        read_pool(refs.pool, refs.pool_out, refs.state, spans[-1], transposed)

    def run(rows: Rows) -> None:
        if rows is not Rows.MIXED:
            body(refs, [stage_chunks.chunks_of(span, static, rows) for span in spans])
            return
        assert tokens_not_finite is not None
        assert values_not_finite is not None
        others = [stage_chunks.chunks_of(span, static, Rows.ALL) for span in spans[1:]]
        first = stage_chunks.chunks_of(spans[0], static, rows, refs.owner)
        first = [x.isolate(functools.partial(tokens_not_finite, x), stages=stages) for x in first]
        if refs.state is None:  # only the inverses are requested
            body(refs, [first, *others])
            return
        start_state(refs.state, refs.initial_state, spans[-1].first == 1)
        nonfinite_rows = refs.nonfinite_rows  # [stages - 1, chunks, C, 1]
        find = lambda x: jnp.maximum(nonfinite_rows[stages - 2, x.index][None], values_not_finite(x))
        last = stage_chunks.chunks_of(spans[-1], static, rows, refs.owner_prev)
        others[-1] = [x.isolate(functools.partial(find, x), stages=stages) for x in last]
        body(refs, [first, *others])
        for stage in reversed(range(1, stages - 1)):
            nonfinite_rows[stage] = nonfinite_rows[stage - 1]
        for x in first:
            nonfinite_rows[0, x.index] = x.nonfinite_rows[0]

    run_variant(
        run, refs, [x for span in spans for x in all_chunks(span, static)], static, (refs.o, refs.v_new_over_beta)
    )
    if refs.pool is not None:
        # As in `run_forward`, earlier grid steps compute from scratch memory in which nothing was prepared.
        ends_here = (spans[-1].last == 1) & (pl.program_id(2) >= stages - 1)
        write_pool(refs.state, refs.pool_out, ends_here, transposed)


def all_chunks(span: chunk_spans.Span, static: FusedStatic) -> list[chunk_spans.Span]:
    """Return the chunks of a span that `run_variant` has to look at: of a piece, whose rows follow one another, two."""
    indices = (0, static.chunks - 1) if static.varlen else range(static.chunks)
    return [span.of_chunk(jnp.int32(i)) for i in indices]


def load_state(refs: Any, prev: StageChunk, heads: slice) -> jax.Array:
    """Return the state of some heads before the chunk `prev`, for the body of `run_forward`.

    Where a sequence starts, its initial state is selected here. To store it first would cost more, because that takes a
    branch, and the compiler moves no operation across it. Only the search for rows that are not finite needs it stored.
    """
    S = refs.state[heads]
    return S if refs.pool is not None or prev.masks is not None else first_state(S, refs, prev, heads)


def first_state(S: jax.Array, refs: Any, chunk: StageChunk, heads: slice) -> jax.Array:
    """Return the initial state of some heads where the chunk is the first one of its row, and S elsewhere."""
    if chunk.index:  # no other chunk of a grid step is the first one of a row
        return S
    start = empty_state(S.shape) if refs.initial_state is None else refs.initial_state[heads]
    return jnp.where(chunk.span.first == 1, start, S)


def run_backward(
    refs: Any,
    body: Callable[[Any, StageChunk], None],
    static: FusedStatic,
    *,
    not_finite: Callable[[], jax.Array],
    part: slice = slice(None),
    results: Sequence,
    in_lanes: Sequence = (),
    sums: Sequence = (),
) -> None:
    """Run a grid step of a backward, which takes the gradient of the state back through a chunk, in reverse order.

    Args:
      refs: the Refs of the kernel: table, owner, dht, dh0 and dstate.
      body: gets the Refs, whose dstate is never None, and the chunk.
      static: the static description of the launch.
      not_finite: returns which rows of the chunk are not finite.
      part: the part of a head of the state's gradient that is searched for NaN and infinity; the rest is finite if this
        part is.
      results: Refs of gradients of tokens, or None.
      in_lanes: more such Refs, whose tokens lie in the lanes.
      sums: Refs of sums over tokens, or None.
    """
    refs, span = _begin_backward(refs, static)

    def run(rows: Rows) -> None:
        chunk = stage_chunks.stage_chunk(span, rows, static.C, refs.owner)
        chunk = chunk.isolate(not_finite, (refs.dstate, chunk.ending, part))
        body(refs, chunk)
        chunk.poison(results, (refs.dstate, chunk.carried), *((ref, True) for ref in sums), in_lanes=in_lanes)

    run_variant(run, refs, [span], static, (*results, *in_lanes), backwards=True)


def run_backward_chunks(
    refs: Any,
    body: Callable[[Any, list[StageChunk]], list[StageChunk]],
    static: FusedStatic,
    *,
    not_finite: Callable[[StageChunk], jax.Array],
    results: Callable[[int], Sequence],
    in_lanes: Callable[[int], Sequence] = lambda i: (),
    sums: Sequence = (),
) -> None:
    """Run a grid step of a backward that takes several chunks of a row, or of one packed sequence, a grid step.

    Args:
      refs: the Refs of the kernel: table, owner, dht, dh0 and dstate.
      body: gets the Refs, whose dstate is never None, and the chunks in the order of their tokens. It takes the
        gradient of the state through them by `StageChunk.take` and `give`, and returns the chunks after this.
      static: the static description of the launch.
      not_finite: returns which rows of a chunk are not finite.
      results, in_lanes: return the Refs of a chunk by its number, as in `run_backward`.
      sums: as in `run_backward`.
    """
    refs, span = _begin_backward(refs, static)

    def run(rows: Rows) -> None:
        chunks = stage_chunks.chunks_of(span, static, rows, refs.owner)
        chunks = body(refs, [x.isolate(functools.partial(not_finite, x), stages=2) for x in chunks])
        if rows is not Rows.MIXED:
            return

        @pl.when(jnp.max(functools.reduce(jnp.maximum, [x.nonfinite_rows for x in chunks])) > 0.0)
        def _():
            for x in chunks:
                x.poison(results(x.index), *((ref, True) for ref in sums), in_lanes=in_lanes(x.index))

    written = [ref for i in range(static.chunks) for ref in (*results(i), *in_lanes(i))]
    run_variant(run, refs, all_chunks(span, static), static, written, backwards=True)


def _begin_backward(refs: Any, static: FusedStatic) -> tuple[Any, Any]:
    """Return the Refs with a dstate, in which the gradient of the state has begun if a sequence ends, and the span."""
    if refs.dh0 is not None:
        # The block of the output stays in fast memory until another sequence begins.
        refs = refs._replace(dstate=refs.dh0)
    span = current_span_backwards(refs.table, static)
    start_state(refs.dstate, refs.dht, ends(span))
    return refs, span


def run_variant(
    body: Callable[[Rows], None],
    refs: Any,
    spans: Sequence[Any],
    static: FusedStatic,
    results: Sequence = (),
    *,
    backwards: bool = False,
    filled: bool = False,
) -> None:
    """Run the body of a grid step in the cheapest variant that fits its chunks, because masks and selections cost time.

    Args:
      body: gets one kind of `Rows`, which holds for all chunks of the grid step.
      refs: the Refs of the kernel; if there is an owner, a chunk may hold several sequences.
      spans: the spans that the stages work on. With `static.varlen`, the body does not run where none of them has rows.
      static: the static description of the launch.
      results: Refs of tokens that the last stage writes, or None.
      backwards: whether the last span of a chunk comes first.
      filled: whether the spans are known to have rows, and no results are to be cleared.
    """
    if static.varlen:
        whole = functools.reduce(jnp.logical_and, [(span.begin <= 0) & (span.end >= static.C) for span in spans])
        empty = functools.reduce(jnp.logical_and, [span.begin == span.end for span in spans])

        some = functools.partial(body, Rows.SOME)

        def run_some() -> None:
            clear_unowned(spans[-1], results, backwards)
            pl.when(jnp.logical_not(empty))(some)

        either(whole, functools.partial(body, Rows.ALL), some if filled else run_some)
    elif refs.owner is not None:
        mixed = functools.reduce(jnp.logical_or, [span.mixed == 1 for span in spans])
        either(mixed, functools.partial(body, Rows.MIXED), functools.partial(body, Rows.ALL))
    else:
        body(Rows.SOME if static.partial else Rows.ALL)


def clear_unowned(span: chunk_spans.Piece, results: Sequence, backwards: bool = False) -> None:
    """Clear the results of a chunk if no span owns some of its rows, in the first grid step that writes the chunk."""
    pl.when(((span.closes if backwards else span.opens) & span.unowned) == 1)(functools.partial(layout.clear, *results))


def empty_state(shape: tuple[int, ...]) -> jax.Array:
    """Return a state of zeros, of which XLA does not know where a kernel is interpreted that they are zeros.

    A CPU multiplies an array by numbers that XLA knows to be all the same as if they were an array in memory, if a sum
    over the product follows in the same fusion: it reads whatever lies there.
    """
    zeros = jnp.zeros(shape, jnp.float32)
    return lax.platform_dependent(zeros, mosaic=lambda x: x, default=lax.optimization_barrier)


def start_state(state_ref, start_ref, begins: jax.Array) -> None:
    """Load an initial state, or in a backward the gradient of a final state; zeros if there is no such Ref."""

    @pl.when(begins)
    def _():
        state_ref[...] = empty_state(state_ref.shape) if start_ref is None else start_ref[...]


def read_pool(pool_ref, pool_out_ref, state_ref, span: chunk_spans.Piece, transposed: bool) -> None:
    """Load the state of a sequence from its slot in the pool, where the sequence starts."""
    pl.when(span.first == 1)(lambda: pools.fetch_states(pool_ref, state_ref, span.continues, transposed))

    @pl.when((pl.program_id(2) == 0) & (span.sequence == span.target))
    def _():
        pools.copy_through(pool_ref, pool_out_ref)


def write_pool(state_ref, pool_out_ref, ends: jax.Array, transposed: bool) -> None:
    """Store the state of a sequence in its slot of the pool, where the sequence, or a block of its tokens, ends."""
    pl.when(ends)(functools.partial(pools.put_states, state_ref, pool_out_ref, transposed))
