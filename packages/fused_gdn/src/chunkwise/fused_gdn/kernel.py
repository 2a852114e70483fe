"""The forward in one launch: loads and stores, kernel body, launcher. The tile mathematics is in tile.py.

With K, Q, V the rows of a chunk, S the state before it, B = diag(beta), G the cumulative gate and
D_ij = exp(G_i - G_j),

    A_inv = (I + tril(K K^T * D, -1) B)^-1        P = scale tril(Q K^T * D) B     no state in them
    R = V - e^G K S                               values less the state's values of their keys
    U = A_inv R                                   v_new over beta: the new values are v_new = B U
    o = scale e^G Q S + P U                       S' = e^G_last S + K^T e^(G_last - G) B U

One grid step makes P of a chunk, and the part of A_inv that takes no products; the next grid step takes the state
through the chunk. With several chunks a grid step, turns take the place of grid steps, and the end of each overlaps
with the next one. If an earlier launch over the same tokens has made A_inv, it is read.

With bfloat16 tensors, S, A_inv, P, R and U enter products as two bfloat16 parts, 16 bits. They must not be rounded to 8
bits, because where keys repeat they oscillate, and sums over them cancel.

The matrices of p heads lie side by side in the lanes ("packed", see shared.kernels.packed): n = heads / p packs. States
are [K, V], as the user has them.

A chunk of a stream, or of rows of segments, may hold several sequences or padding. Only grid steps with such a chunk
compute with masks. Sequences that are not finite are then zero in all products, see kernels.spans.nonfinite, and all
their results in that chunk, in all heads of the grid step, become NaN.
"""

import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from chunkwise.fused_gdn import config, loads, tile
from chunkwise.fused_gdn.operands import GdnRefs
from chunkwise.shared import tuning
from chunkwise.shared.kernels import interleaved, inverse, packed
from chunkwise.shared.kernels.spans import chunk_loop, layout, schedule, stage_chunks
from chunkwise.shared.kernels.spans.operands import ABSENT, FusedStatic, Operands

# Heads that take the state through a chunk together. Products of such a stage hide the latency of other stages.
STAGE = 8


def _fwd_kernel(refs: GdnRefs, *, static: FusedStatic, s: tile.Heads) -> None:
    """Take the state through the chunk prev and prepare the chunk cur, of the next grid step.

    The two do not wait for one another: products with the state fill the matrix unit, while the inverse eliminates
    rows, for which it is not needed.
    """
    chunk_loop.run_forward(
        refs,
        functools.partial(_grid_step, static=static, s=s),
        static,
        tokens_not_finite=functools.partial(loads.tokens_not_finite, refs, s, refs.k),
        values_not_finite=functools.partial(loads.values_not_finite, refs, s),
        # After a product, whole columns of a state are not finite, so its first rows show it.
        part=slice(0, 8) if refs.initial_state is None else slice(None),
        transposed=False,
    )


def _turns_kernel(refs: GdnRefs, *, static: FusedStatic, s: tile.Heads) -> None:
    """Do what `_fwd_kernel` does for several chunks a grid step, in turns; each prev is a grid step behind its cur."""
    body = functools.partial(_grid_turns, static=static, s=s)
    chunk_loop.run_forward_chunks(refs, body, static, stages=2, transposed=False)


def _grid_turns(
    refs: GdnRefs, of_stages: list[list[stage_chunks.StageChunk]], static: FusedStatic, s: tile.Heads
) -> None:
    """Run a turn for every chunk of a grid step.

    Each takes the state through a chunk, and prepares the one before it, whose arrays none of its stages reads, so that
    they are stored at once. The first one prepares the last chunk of the grid step before, from scratch memory.
    """
    chunks, prevs = of_stages
    *earlier, last = each = loads.of_chunks(refs, s, static.chunks)
    queries = None if last.queries is None else last.queries[...]
    tokens = [(queries, last.keys[...], refs.g_late[...], refs.beta_late[...])]
    tokens += [loads.load_chunk(x, chunk.valid, s, static)[:4] for x, chunk in zip(earlier, chunks, strict=False)]
    afters, curs = [last._replace(keys=ABSENT, queries=ABSENT), *earlier], [chunks[-1], *chunks[:-1]]
    turns = [_turn(*x, static, s) for x in zip(each, afters, tokens, curs, prevs, strict=True)]
    # A turn begins when the state of the first heads is through the chunk of the turn before: after the round of the
    # gates, one for each stage of heads, one that ends the inverse, and two that pass the first heads.
    rounds, running = len(s.split(STAGE)) + 4, iter(())
    for turn in (*turns, iter(())):
        for _ in itertools.islice(turn, rounds):
            next(running, None)
        # Every round of a turn must run, also where it has more of them than overlap.
        schedule.finish(running)
        running = turn
    q, last.keys[...], refs.g_late[...], refs.beta_late[...], _ = loads.load_chunk(last, chunks[-1].valid, s, static)
    if q is not None:
        last.queries[...] = q
    # The first grid step has no state to pass. What the next one finds is the state before the first token.
    chunk_loop.start_state(refs.state, refs.initial_state, pl.program_id(2) == 0)


def _grid_step(
    refs: GdnRefs, cur: stage_chunks.StageChunk, prev: stage_chunks.StageChunk, static: FusedStatic, s: tile.Heads
) -> None:
    """Run the turn of a grid step of one chunk."""
    tokens = loads.load_chunk(refs, cur.valid, s, static)[:4]
    schedule.finish(_turn(refs, refs, tokens, cur, prev, static, s))


def _turn(
    refs: GdnRefs, after: GdnRefs, tokens: Any, cur: stage_chunks.StageChunk, prev: stage_chunks.StageChunk,
    static: FusedStatic, s: tile.Heads,
) -> Iterator[None]:  # fmt: skip
    """Run both stages, and yield between rounds of them.

    `after` are the Refs where the arrays of cur go; those of keys and queries are None if these are there already.
    """
    q, k, g, beta = tokens  # as `loads.load_chunk` returns them
    exact = k.dtype != jnp.bfloat16
    gates = tile.gate_sums(g, beta, s, exact, cur.masks)
    yield
    stages, staged, state_reads = s.split(STAGE), [], {}
    # Nobody needs a state where only the inverses are requested, as by `jax.checkpoint` before a backward.
    needs_state = any(ref is not None for ref in (refs.o, refs.ht, refs.h, refs.v_new_over_beta))

    def prepare_heads(several: list[tile.Heads]) -> Iterator[None]:
        for part in several:
            values = prepare(refs, q, k, gates, part, cur.masks, static)
            if after is refs:  # this turn reads there the arrays of prev
                staged.append((part, values))
            else:
                loads.store(after, values, part.packs_at)
            yield

    def prepare_and_read(stage: tile.Heads) -> Iterator[None]:
        schedule.finish(prepare_heads(stage.split(STAGE // 2)))
        yield
        if needs_state:
            state_reads[stage.first] = read_state(refs, prev, stage, static)

    def read_and_pass(stage: tile.Heads) -> Iterator[None]:
        if stage.first not in state_reads:
            state_reads[stage.first] = read_state(refs, prev, stage, static)
            yield
        reads = state_reads.pop(stage.first)
        yield from pass_chunk(refs, prev, A_inv, stage, reads, static)

    # The matrix unit takes products in the order of the program, and where one waits, all wait. Every product of the
    # inverse waits for the one before. Between two of them, some heads are prepared and others read the state. If A_inv
    # is read instead, a stage does all of its work at once, so that fewer tiles are kept.
    passing = schedule.software_pipeline(read_and_pass(stage) for stage in stages if needs_state)
    if refs.A_inv is None:
        A_inv, inverting = None, inverse.block_doubling(refs.blocks[...], refs.A[...], 3 if exact else 2)
        preparing = schedule.software_pipeline(prepare_and_read(stage) for stage in stages)
        for _ in stages:
            A_inv = next(inverting, A_inv)
            next(preparing)
            yield
        *_, A_inv = A_inv, *inverting
    else:
        A_inv = refs.A_inv[...]
        halves = [part for stage in stages for part in stage.split(STAGE // 2)]
        preparing = prepare_heads(halves)
        order = tuning.find_order("chunkwise.fused_gdn", "precomputed", (s.heads, s.C, s.K), "pm" * len(halves))
        schedule.interleave(order, p=passing, m=preparing)
    for remaining in (preparing, passing):
        yield from remaining
    if refs.A_inv_out is not None:
        refs.A_inv_out[...] = A_inv
    for part, values in staged:
        loads.store(after, values, part.packs_at)
    # All stages may share a key head, and those of the turn before may still read it.
    for ref, x in ((after.keys, k), (after.queries, q)):
        if ref is not None:
            ref[...] = x


def prepare(refs, q, k, gates: tile.Gates, part: tile.Heads, masks, static: FusedStatic) -> dict[str, jax.Array]:
    """Return the arrays of some heads of cur that the next grid step needs, by the names of Refs in scratch memory."""
    g = tile.pack_gates(gates, part)
    pairs, start, end = tile.boundary_decays(g, part, masks)
    staged = {"start": start, "end": end * g.beta}  # [n, C, p C]
    with_keys, with_queries = refs.A_inv is None, refs.o is not None
    if not with_keys and not with_queries:
        return staged
    left = [k[part.keys_at]] * with_keys + ([q[part.keys_at]] if with_queries else [])
    *products, D = tile.scores(left, k[part.keys_at], g, pairs, part)  # [n, C, p C]
    weight = D * g.beta_rows
    if with_keys:
        A = products[0] * weight
        staged |= {"A": A, "blocks": inverse.begin_inverse(A)}
    if with_queries:
        scores = packed.split_bf16(products[-1] * (weight * static.scale), k.dtype)
        staged["scores"] = packed.concat_lanes(scores)
    return staged


def load_state(refs: GdnRefs, prev: stage_chunks.StageChunk, part: tile.Heads, static: FusedStatic) -> jax.Array:
    """Return the states [heads, K, V] of some heads before prev; with several chunks a grid step they are stored."""
    return refs.state[part.values_at] if static.chunks > 1 else chunk_loop.load_state(refs, prev, part.values_at)


def read_state(refs: GdnRefs, prev: stage_chunks.StageChunk, part: tile.Heads, static: FusedStatic):
    """Multiply keys and queries of prev by the state before it.

    Returns:
      The decay from the start of the chunk [heads, C, V], and the products of keys and of queries [heads, C, V]
      float32.
    """
    S = load_state(refs, prev, part, static)
    k = refs.keys[part.keys_at]  # [key heads, C, K]
    if refs.h is not None:
        refs.h[part.values_at] = S.astype(refs.h.dtype)
    q = None if refs.queries is None else refs.queries[part.keys_at]
    start = tile.head_columns(refs.start[part.packs_at], part, part.V)
    return start, *tile.read_state(k, q, S, part)


def pass_chunk(
    refs: GdnRefs, prev: stage_chunks.StageChunk, A_inv, part: tile.Heads, state_reads, static: FusedStatic
) -> Iterator[None]:
    """Compute v_new_over_beta of prev, yield, then write the output of prev and take the state through it.

    Args:
      refs: the Refs of the kernel.
      prev: the chunk; rows that are not valid hold anything.
      A_inv: packed inverses [n, C, p C] of all heads.
      part: the heads to take.
      state_reads: the result of `read_state` for these heads.
      static: the static description of the launch.
    """
    (start, KS, QS), dtype = state_reads, refs.k.dtype
    # Pieces share a chunk, so each stores only its rows. Otherwise all rows are stored, because nobody reads rows past
    # the last token.
    stored = prev.valid if static.varlen else None
    v = layout.load_heads(refs.v, part.V, part.values_at, prev.valid).astype(jnp.float32)  # [heads, C, V]
    A_inv = packed.concat_lanes(packed.split_bf16(A_inv[part.packs_at], dtype))
    v_new_over_beta = tile.multiply_parts(A_inv, v - start * KS, part, dtype)  # [heads, C, V]
    if refs.v_new_over_beta is not None:
        layout.store_heads(refs.v_new_over_beta, v_new_over_beta, stored, part.first)
    yield
    k, end = refs.keys[part.keys_at], tile.head_columns(refs.end[part.packs_at], part, part.V)
    if QS is not None:
        inside = tile.multiply_parts(refs.scores[part.packs_at], v_new_over_beta, part, dtype)  # [heads, C, V]
        layout.store_heads(refs.o, (static.scale * start) * QS + inside, stored, part.first)
    S = load_state(refs, prev, part, static)
    refs.state[part.values_at] = start[:, -1:] * S + tile.write_state(k, end * v_new_over_beta, part)


def chunks_in_turn(x: Operands, static: FusedStatic) -> int:
    """Return how many chunks a grid step takes in turn: several if each row is a long sequence of whole grid steps."""
    turns, plain = static.config.turns, not static.varlen and x.owner is None and x.pool is None
    return turns if plain and static.spans >= 4 * turns and static.readable % (turns * static.C) == 0 else 1


def plan(x: Operands, static: FusedStatic, outputs: tuple[str, ...]) -> dict[str, Any]:
    """Return the launch of the forward of many heads, as `launch_of` does, of one chunk or some turns a grid step."""
    static = static.in_spans_of(chunks_in_turn(x, static))
    s, scratch = loads.heads_of(static, static.config.heads), buffers(x, static, outputs)
    if static.chunks > 1:
        scratch |= {"g_late": (s.C, s.heads), "beta_late": (s.C, s.heads)}
    if x.owner is not None:
        scratch |= {"nonfinite_rows": (1, s.C, 1), "owner_prev": pltpu.VMEM((1, 1, s.p * s.C), jnp.int32)}
    return launch_of(x, static, outputs, _turns_kernel if static.chunks > 1 else _fwd_kernel, scratch)


def buffers(x: Operands, static: FusedStatic, outputs: tuple[str, ...]) -> dict[str, Any]:
    """Return the state, if no output holds it, and the arrays that the first stage leaves for the second."""
    s, dtype, chunks = loads.heads_of(static, static.config.heads), x.k.dtype, static.chunks
    n, lanes = chunks * s.heads // s.p, s.p * s.C
    matrix, of_keys = (n, s.C, lanes), pltpu.VMEM((chunks * s.heads // s.group, s.C, s.K), dtype)
    scratch: dict[str, Any] = {"start": matrix, "end": matrix, "keys": of_keys}
    if "ht" not in outputs or "M" in outputs:
        scratch["state"] = s.heads, s.K, s.map_lane + s.K if "M" in outputs else s.V
    if "o" in outputs:
        parts = 2 if dtype == jnp.bfloat16 else 1
        scratch |= {"queries": of_keys, "scores": pltpu.VMEM((n, s.C, parts * lanes), dtype)}
    if x.A_inv is None:
        scratch |= {"A": matrix, "blocks": (n, inverse.first_block_rows(s.C), lanes)}
    return scratch


def launch_of(
    x: Operands, static: FusedStatic, outputs: tuple[str, ...], body: Callable, scratch: dict[str, Any],
    stages: int = 2, reads_v: int | None = 1, reads_A_inv: int = 1,
) -> dict[str, Any]:  # fmt: skip
    """Return the launch of a forward, the arguments of `launcher.launch`.

    Args:
      x: operands. With A_inv, of an earlier launch, the inverse is not computed again.
      static: the static description.
      outputs: which of "o", "ht", "h", "v_new_over_beta", "A_inv", "pool_out", "M".
      body: the body of the kernel, called with the Refs, the static description and the heads of a grid step.
      scratch: the buffers.
      stages: the stages of a grid step.
      reads_v, reads_A_inv: the stages that read v, or None, and A_inv.

    Returns:
      The arguments. The launch gives a dict of these outputs: o, laid out and typed as v; ht, the final states
      [N, HV, K, V], and M, the matrices [N, HV, K, K] that take a state through all tokens, both float32 and undefined
      for empty sequences; and h, v_new_over_beta, A_inv and pool_out as in `Operands`. The pool is updated in place.
    """
    B, HV, s, dtype = static.B, static.HV, loads.heads_of(static, static.config.heads), x.k.dtype
    NT = static.spans * static.chunks if static.varlen else -(-static.T // static.C)
    cuts = [chunk_loop.blocks(static, stage, stages) for stage in range(stages)]
    first, second, last, matrix = *cuts[:2], cuts[-1], (s.heads // s.p, s.C, s.p * s.C)
    state, gate, with_output = last.state(s.heads, s.K, s.V), first.values(s.heads), "o" in outputs
    key, values = first.tokens(s.heads // s.group * s.K), [cut.tokens(s.heads * s.V) for cut in cuts]
    slot = s.heads, *(() if x.pool is None else x.pool.shape[2:])

    def read(name: str, array: Any, spec: pl.BlockSpec | None) -> dict[str, Any]:
        """Return an operand by its name.

        If it is not read, a block of it stays an operand, so that vmap over it alone gives all results the same batch
        axis.
        """
        unread = interleaved.first(array)
        return {f"unread_{name}": (unread, first.unread(unread))} if spec is None else {name: (array, spec)}

    estimate = config.cost if with_output else config.states_cost
    return dict(
        body=functools.partial(body, static=static, s=s),
        refs=GdnRefs,
        name=f"chunk_gated_delta_rule_{'fwd' if with_output else 'summary' if 'ht' in outputs else 'states'}_c{s.C}",
        # More grid steps, because the state goes through a chunk one or two grid steps after the chunk is prepared.
        grid=(B, HV // s.heads, x.spans(static) + stages - 1),
        tables={"table": x.table},
        inputs={
            **read("q", x.q, key if with_output else None),
            "k": (x.k, key),
            **read("v", x.v, None if reads_v is None else values[reads_v]),
            "g": (x.g, gate),
            "beta": (x.beta, gate),
            "initial_state": (x.initial_state, state),
            "owner": (x.owner, first.owner(s.p * s.C)),
            **({} if "owner_prev" in scratch else {"owner_prev": (x.owner, last.owner(s.p * s.C))}),
            "pool": (x.pool, last.state(*slot)),
            "A_inv": (x.A_inv, cuts[reads_A_inv].per_chunk(*matrix)),
        },
        outputs=({} if x.pool is None else {"pool_out": (last.target(*slot), x.pool.shape, x.pool.dtype)})
        | {
            "o": (values[-1], x.v.shape, dtype),
            "ht": (state, (static.N, HV, s.K, s.V), jnp.float32),
            "h": (last.per_chunk(s.heads, s.K, s.V), (B, NT, HV, s.K, s.V), dtype),
            "v_new_over_beta": (values[-1], x.v.shape, jnp.float32),
            "A_inv": (second.per_chunk(*matrix), (B, NT, HV // s.p, *matrix[1:]), jnp.float32),
            "M": (last.state(s.heads, s.K, s.K), (static.N, HV, s.K, s.K), jnp.float32),
        },
        requested=outputs,
        like={"o": x.q},
        scratch=scratch,
        in_place={} if x.pool is None else {"pool": "pool_out"},
        cost_estimate=estimate(**static.sizes(), itemsize=dtype.itemsize),
    )
