"""The forward in one launch: kernel body, launcher, and the parts that the launches of both directions share.

Operands are the user's arrays in the flat view [B, T, heads * lanes]: a head is a slice of whole registers. Time is the
last axis of the grid, which is sequential, and the state stays in VMEM along it. The state layout is not the user's
[K, V]: kernels keep states as [V, K], so that a decay per channel is a row.

A packed batch keeps its chunks aligned to the token stream. Without states in or out, masks keep the sequences of a
chunk apart, as they do in rows of segments; only mixed chunks, which have several sequences or padding, compute with
masks. With states a grid step is a piece of a block of chunks, with tokens of one sequence. So every sequence has a
boundary where its state comes in or goes out, and only chunks that the piece does not cover wholly select rows.
"""

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from chunkwise.fused_gla import channels, config, loads, normaliser, packs, tile
from chunkwise.fused_gla.operands import GlaOperands, GlaRefs, GlaStatic
from chunkwise.shared.kernels import launcher, matmul, packed, tiles, windows
from chunkwise.shared.kernels.spans import chunk_loop, layout, schedule, stage_chunks
from chunkwise.shared.kernels.spans.operands import ABSENT


def _gla_fwd_kernel(refs: GlaRefs, s: GlaStatic) -> None:
    """Take the state through the chunks of a span."""
    if refs.ht is not None:
        # The block of the output stays in fast memory until another sequence begins.
        refs = refs._replace(state=refs.ht)
    (span,) = chunk_loop.current_spans(refs.table, 1, s)
    begins = (pl.program_id(2) == 0) | (span.first == 1)
    if refs.pool is None:
        chunk_loop.start_state(refs.state, refs.initial_state, begins)
    else:
        chunk_loop.read_pool(refs.pool, refs.pool_out, refs.state, span, transposed=True)
    if refs.M is not None:
        pl.when(begins)(functools.partial(_set_ones, refs.M))
    if s.varlen and refs.o is not None:
        chunk_loop.clear_unowned(span, (refs.o,))
    # The backward starts from this state when it recomputes the states between the chunks of the span.
    if refs.h is not None:
        refs.h[...] = refs.state[...]
    constant = loads.constant_decays(refs, s, refs.state.shape[0])
    pairs = channels.Pairs.NONE if refs.o is None else loads.pairs_of(refs, s)

    def pass_chunk(chunk: stage_chunks.StageChunk) -> None:
        chunk = loads.isolate(refs, s, chunk, ("q", "k", "v"), (refs.state, chunk.carried))
        if not (s.per_channel or s.constant):
            pass_in_packs(refs, s, chunk)
            loads.poison(s, chunk, (refs.o,), (refs.state, chunk.ending))
            return
        for heads in loads.runs_of(refs, s, config.RUN):
            _pass_in_step(refs, s, chunk, heads, constant, pairs)
        loads.poison(s, chunk, (refs.o,), (refs.state, chunk.ending))

    chunk_loop.run_chunks(pass_chunk, refs, span, s, *chunk_loop.chunk_range(span, s))
    if refs.pool is not None:
        chunk_loop.write_pool(refs.state, refs.pool_out, span.last == 1, transposed=True)


def _pass_in_step(
    refs: GlaRefs, s: GlaStatic, chunk: stage_chunks.StageChunk, heads: slice, constant: Any, pairs: channels.Pairs
) -> None:
    """Take the state of some heads through a chunk, in lock-step, and store their output if it is wanted.

    Gates are per channel, or the decays of all heads are constant.
    """
    q, k, v = loads.load_tensors(refs, s, chunk, heads)
    decays = loads.load_decays(refs, s, chunk, heads, constant and constant.of(heads), pairs)
    S = refs.state[heads]  # [heads, V, K]
    refs.state[heads] = tile.next_state(S, k, v, decays.to_end, decays.through, s.parts)
    if refs.M is not None:
        refs.M[heads] *= decays.through
    if refs.o is None:
        return
    # Outputs read the tokens of the chunk, and the state before the chunk.
    P = channels.scores(q, k, decays, chunk.same) if s.per_channel else tile.scores(q, k, decays)
    from_state = tile.read_state(q, S, decays.from_start)  # [heads, C, V]
    o = tile.read_chunk(P, v) + from_state
    loads.store(refs.o, o, s, chunk, heads)
    if pairs is channels.Pairs.PRODUCT:
        # This stands behind everything else, because the compiler moves no operation across a branch.
        @pl.when(channels.any_left_over(decays))
        def _():
            levels, keys = loads.load_levels(refs, s, chunk, heads), channels.left_over(k, decays)
            P = channels.level_scores(q, keys, levels, s.scale, chunk.same)
            loads.store(refs.o, o + tile.read_chunk(P, v), s, chunk, heads)


def pass_in_packs(
    refs: GlaRefs, s: GlaStatic, chunk: stage_chunks.StageChunk, after: Any = None, backwards: bool = False
) -> None:
    """Take the state through a chunk whose gates are per head, and store the output if it is wanted.

    The Ref of the state after the chunk may be another one. Backwards, keys have the decays from the start of the chunk
    in the place of those to its end, and the scale.
    """
    p, dtype, every, output = s.p, loads.product_dtype(refs), refs.state.shape[0], refs.o is not None
    group, count, after = loads.group_of(refs, s), loads.sum_parts(refs), refs.state if after is None else after
    gates, shared = loads.load_sums(refs, s, chunk, start=output or backwards, end=not backwards), {}

    def step(heads: slice) -> Iterator[None]:
        keys, mine = loads.key_heads(refs, s, heads), gates.of(heads)
        k, v = loads.load_keys(refs.k, refs, s, chunk, heads), loads.load_packs(refs.v, refs, s, chunk, heads)
        S, n = normaliser.split(refs.state[heads], s)  # [heads, V, K], and [heads, 1, K]
        end = jnp.exp2(mine.sums[-1])[:, None]  # [heads, 1, C]
        turned = packs.turned(v, s.V)
        q = of_pairs = from_state = from_start = ABSENT
        if output:
            q = loads.load_keys(refs.q, refs, s, chunk, heads)
            if heads.start % group == 0:
                shared[keys.start] = packs.scores(q, k, s.scale, False, chunk.same)
            of_pairs = packs.pair_exponents(mine, count)
            from_start = packs.over_lanes(mine.sums[:1], p, s.V, count)
            from_state = packs.read(q, (S.astype(dtype),), p * s.V)  # [packs, C, p V]
        # These products wait for no other product, so those of the next heads may begin before these heads end.
        yield
        end = s.scale * end if backwards else end
        v_end = tile.operands(turned.astype(jnp.float32) * end, dtype, s.parts)
        sums = None if n is None else normaliser.next_sums(n, k, tiles.to_column(end), mine.through)
        normaliser.store(after.at[heads], mine.through * S + packs.write_turned(v_end, k), sums)
        if not output:
            return
        start = jnp.exp2(from_start)
        P = jnp.exp2(of_pairs) * tiles.repeat_heads(shared[keys.start], heads.stop - heads.start)
        o = matmul.dot(packed.side_lanes(P.astype(dtype), p), packs.placed(v, p)) + s.scale * start * from_state
        if n is not None:
            least = loads.load_row(refs.least, refs, s, chunk, heads, 1.0)
            o *= normaliser.factors(P, q, n, s.scale * start[:, :, :1], least, s.eps)
        if refs.skip is not None:
            o += loads.load_skip(refs, s, heads) * v.astype(jnp.float32)
        loads.store(refs.o, o, s, chunk, slice(heads.start // p, heads.stop // p))

    schedule.run_each(step, every, packs.heads_at_once(config.RUN, every, group, p))


def _set_ones(ref) -> None:
    ref[...] = jnp.ones_like(ref)


def inputs_of(x: GlaOperands, s: GlaStatic, cut: layout.Blocks, heads: int, queries: str | None) -> dict[str, tuple]:
    """Return the operands of a launch by name, each with its BlockSpec; a grid step has `heads` value heads.

    `queries` is the Ref of q, None for no q. Of "unread" one block, which nobody reads, is an operand.
    """
    keys, share = s.key_blocks(heads)
    key, value = cut.tokens(keys * s.K, share), cut.tokens(heads * s.V)
    gate = cut.tokens(heads * s.K) if s.per_channel else cut.rows(s.chunks, heads, 1, s.C)
    # The kernels clip gates per channel when they load them, because a separate pass over them in HBM would cost time.
    g = x.g if x.g is None or s.per_channel else tiles.clip_gate(x.g)
    # These are whole rows, because a single number would be broadcast over the lanes at every use.
    g_gamma = None if x.g_gamma is None else jnp.broadcast_to(tiles.clip_gate(x.g_gamma), (s.HV, 1, s.C))
    return {
        "q": (x.q if queries == "q" else None, key),
        "unread": (x.q if queries == "unread" else None, cut.unread(x.q)),
        "k": (x.k, key),
        "v": (x.v, value),
        "g": (g, gate),
        "g_gamma": (g_gamma, windows.along((heads, 1, s.C), 1)),
        "log_weight": (None if x.log_weight is None else tiles.clip_gate(x.log_weight), gate),
        "least": (x.least, gate),
        "skip": (x.skip, windows.along((1, heads * s.V), None, 1)),
        "initial_state": (x.initial_state, cut.state(heads, *s.state)),
        "owner": (x.owner, cut.owner(s.C)),
    }


def launched(x: GlaOperands, s: GlaStatic, kind: str, heads: int, **costs: bool) -> dict[str, Any]:
    """Return the arguments of `launcher.launch` that all launches of this package have: name, grid, table and cost."""
    return dict(
        name=f"chunk_gla_{kind}_c{s.C}" + ("" if x.table is None else "_varlen"),
        grid=(s.B, s.HV // heads, x.spans(s)),
        tables={"table": x.table},
        cost_estimate=config.cost(**s.sizes(), itemsize=x.v.dtype.itemsize, per_channel=s.per_channel, **costs),
    )  # fmt: skip


def launch(x: GlaOperands, s: GlaStatic, outputs: tuple[str, ...]) -> dict[str, jax.Array]:
    """Run the forward, or the part of it that makes these outputs.

    Args:
      x, s: operands and static sizes.
      outputs: names of outputs.

    Returns:
      A dict of the outputs: o [B, T, HV * V]; ht, the final states [N, HV, V, K] float32; h, the state before every
      grid step [B, spans, HV, V, K] float32; M, the decay of a state over all tokens of its sequence [N, HV, 1, K]
      float32, only for gates per channel; pool_out, the pool, updated in place.
    """
    heads, with_output, cut = s.config.heads, "o" in outputs, chunk_loop.blocks(s)
    state = heads, *s.state
    slot = heads, *(() if x.pool is None else x.pool.shape[2:])
    available = {
        "o": (cut.tokens(heads * s.V), x.v.shape, x.v.dtype),
        "ht": (cut.state(*state), (s.N, s.HV, *s.state), jnp.float32),
        "h": (cut.per_span(*state), (s.B, s.spans, s.HV, *s.state), jnp.float32),
        "M": (cut.state(heads, 1, s.K), (s.N, s.HV, 1, s.K), jnp.float32),
    }
    if x.pool is not None:
        available["pool_out"] = cut.target(*slot), x.pool.shape, x.pool.dtype
    kind = "fwd" if with_output else "states" if "h" in outputs else "summary"
    # The launch of states takes the place of the forward, and vmap over q alone must give both the same batch axis.
    queries = {"fwd": "q", "states": "unread", "summary": None}[kind]
    if kind == "summary":
        dtype = matmul.operand_dtype(x.q.dtype, x.k.dtype, x.v.dtype)
        x = dataclasses.replace(x, k=x.k.astype(dtype), v=x.v.astype(dtype))
    return launcher.launch(
        functools.partial(_gla_fwd_kernel, s=s),
        GlaRefs,
        inputs=inputs_of(x, s, cut, heads, queries) | {"pool": (x.pool, cut.state(*slot))},
        outputs=available,
        requested=outputs,
        # The state needs scratch memory unless the output ht holds it.
        scratch={} if "ht" in outputs else {"state": state},
        in_place={} if x.pool is None else {"pool": "pool_out"},
        **launched(x, s, kind, heads, output=with_output),
    )
