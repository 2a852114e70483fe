"""The forward for few heads, as one of many devices has: a grid step takes several chunks, in one launch.

The chain from the state before a chunk to the state after it is what few heads wait for: in `kernel` it has three
products that wait for one another. Two of them need no state, so they are applied to one another ahead of it. With the
names of `kernel`,

    L = [P A_inv; A_inv; K^T e^(G_last - G) B A_inv]     no state in it
    [o - scale e^G Q S; U; S' - e^G_last S] = L R        what new values add to the output, U, and to the state

So the chain has two products, and everything else is done for all chunks of a grid step at once, as if they were more
heads. Three stages share a grid step, each on chunks of its own, so that none waits for another: the first prepares
P and I + A, the second makes A_inv and L, the third takes the state through the chunks one by one. L has only the rows
of what is requested. The map of `kernel_map` is such a launch without outputs: M is K more channels of the state, which
have no values. A launch for the inverses alone, as `jax.checkpoint` runs it before a backward, has the first two
stages, without P and L. Where an earlier launch has made A_inv, the first stage makes L, and there is no second one.

A span is several chunks of a row that is one sequence, or of a packed sequence: a piece of so many chunks.
"""

import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from chunkwise.fused_gdn import kernel, loads, tile
from chunkwise.fused_gdn.operands import GdnRefs
from chunkwise.shared.kernels import inverse, matmul, packed
from chunkwise.shared.kernels.spans import chunk_loop, layout, schedule, stage_chunks
from chunkwise.shared.kernels.spans.operands import FusedStatic, Operands

# Heads of all chunks together that are prepared, inverted and finished at a time, and of a chunk that pass the state.
PREPARED, INVERTED, FINISHED, PASSED = 4, 16, 4, 8
# Of up to so many heads, two chunks are prepared at a time.
FEW = 4


def supports(x: Operands, static: FusedStatic) -> bool:
    """Return whether the launch is for these operands."""
    # Masks cost more than 16 heads gain.
    return static.in_long_spans().chunks > 1 and (x.owner is None or static.config.heads < 16)


def _kernel(refs: GdnRefs, *, static: FusedStatic, s: tile.Heads) -> None:
    """Run the stages of a grid step, each on chunks of its own."""
    stages = 1 + (refs.A_inv is None) + (refs.left is not None)
    body = functools.partial(_grid_step, static=static, s=s)
    chunk_loop.run_forward_chunks(
        refs,
        body,
        static,
        stages=stages,
        transposed=False,
        tokens_not_finite=lambda x: loads.tokens_not_finite(refs, s, refs.k, at=x.rows(s.C)),
        values_not_finite=lambda x: loads.values_not_finite(refs, s, x.rows(s.C)),
    )


def _grid_step(
    refs: GdnRefs, of_stages: list[list[stage_chunks.StageChunk]], static: FusedStatic, s: tile.Heads
) -> None:
    """Run all stages of a grid step on their chunks."""
    inverts, passes = refs.A_inv is None, refs.state is not None
    chunks, *_, prev = of_stages
    q, k, g, beta = _load_chunks(refs, chunks, s, static)
    every, staged, inverses, lefts = s.over(static.chunks), {}, {}, {}
    if chunks[0].masks is None:
        parts = every.split(2 * s.heads if s.heads <= FEW else PREPARED)
    else:
        # Every chunk has masks of its own.
        parts = [part for x in chunks for part in s.in_chunk(x.index, s).split(PREPARED)]
    stages: dict[str, Iterator] = dict(m=_prepare(refs, q, k, g, beta, chunks, s, parts, static, staged))
    # Between two products of the inverse, or of the state, there is other work.
    n, order = len(parts), "xm"
    if passes:
        stages["p"] = schedule.software_pipeline(_pass_chunks(refs, prev, part, s, static) for part in s.split(PASSED))
        # With 4 to 8 heads it is faster to begin with the state, with fewer or more to begin with the inverse.
        first, last = ("pxpxpmpxpm", "xpmxp") if 4 <= s.heads <= 8 else ("xpmxpmpxpmp", "xpxp")
        order = first + "pmp" * (n - 2) + last + "fp" * n if inverts else "m" + "mpfp" * n
    if inverts:
        inverses = {heads: [] for heads in every.split(INVERTED)}
        each = [loads.invert(refs, heads.packs_at, k.dtype, found) for heads, found in inverses.items()]
        stages["x"] = inverting = _advance_all(each)
        if passes:
            stages["f"] = _make_left(refs, every, inverting, inverses, lefts)
    elif passes:
        stages["f"] = _read_inverses(refs, chunks, k, staged, lefts)
    schedule.interleave(order, **{name: stages.get(name, iter(())) for name in "xmpf"})
    for remaining in stages.values():
        schedule.finish(remaining)
    _store_for_next_step(refs, q, k, staged, inverses, lefts)
    if refs.M is not None:

        @pl.when(prev[-1].span.last == 1)
        def _():
            refs.ht[...], refs.M[...] = refs.state[:, :, : s.V], refs.state[:, :, s.map_lane :]


def _load_chunks(refs: GdnRefs, chunks: list[stage_chunks.StageChunk], s: tile.Heads, static: FusedStatic):
    """Load the chunks of a grid step: q (or None) and k [chunks keys, C, K]; g and beta [C, chunks heads] float32."""
    each = [loads.load_chunk(refs, chunk.valid, s, static, chunk.rows(s.C))[:4] for chunk in chunks]
    q, k, g, beta = zip(*each, strict=True)
    return (
        None if refs.q is None else jnp.concatenate(q),
        jnp.concatenate(k),
        jnp.concatenate(g, axis=1),
        jnp.concatenate(beta, axis=1),
    )


def _prepare(
    refs: GdnRefs, q, k, g, beta, chunks: list[stage_chunks.StageChunk], s: tile.Heads, parts: list[tile.Heads],
    static: FusedStatic, staged: dict,
) -> Iterator[None]:  # fmt: skip
    """Add to `staged` what the second stage needs of the heads of all chunks, those of one of the parts at a time."""
    gates = tile.gate_sums_of(g, beta, s, k.dtype != jnp.bfloat16, [x.masks for x in chunks])
    yield
    for part in parts:
        masks = chunks[part.first // s.heads].masks
        of_part = gates if masks is None else tile.select_chunk(gates, part)
        staged[part] = kernel.prepare(refs, q, k, of_part, part, masks, static)
        yield


def _advance_all(each: list[Iterator]) -> Iterator[None]:
    """Advance all iterators together, until the last one ends."""
    done = object()
    while each:
        each = [x for x in each if next(x, done) is not done]
        yield


def _make_left(refs: GdnRefs, every: tile.Heads, inverting: Iterator, inverses: dict, lefts: dict) -> Iterator[None]:
    """Leave L in `lefts`, some heads at a time, once the inverse is whole."""
    schedule.finish(inverting)
    for part in every.split(FINISHED):
        heads = [x for x in inverses if x.first <= part.first][-1]
        A_inv = inverses[heads][-1][part._replace(first=part.first - heads.first).packs_at]
        at = part.packs_at
        scores = None if refs.scores is None else refs.scores[at]
        lefts[part] = value_factor(refs, scores, A_inv, refs.end[at] * A_inv, refs.keys[part.keys_at], part)
        yield


def _read_inverses(refs: GdnRefs, chunks: list, k, staged: dict, lefts: dict) -> Iterator[None]:
    """Leave L in `lefts` from the inverses that an earlier launch has made, for heads that are prepared."""
    A_inv = stage_chunks.load_each(refs.A_inv, chunks)  # [n, C, p C]
    while len(lefts) < len(staged):
        part, values = list(staged.items())[len(lefts)]
        inverses = A_inv[part.packs_at]
        ends = values["end"] * inverses
        lefts[part] = value_factor(refs, values.get("scores"), inverses, ends, k[part.keys_at], part)
        yield


def value_factor(refs: GdnRefs, scores, A_inv, A_end, k, part: tile.Heads) -> jax.Array:
    """Return the rows of L that are requested, [P A_inv; A_inv; K^T A_end] of every head, packed, as parts.

    Args:
      refs: the Refs of the kernel.
      scores: parts of P side by side, [n, C, parts p C].
      A_inv: packed inverses [n, C, p C]; A_end: the same with each row times its step size and decay to the end.
      k: [key heads, C, K].
      part: the heads.
    """
    dtype, width, rows = k.dtype, part.p * part.C, []
    if refs.o is not None:
        spread = [inverse.spread(x, part.C) for x in packed.split_bf16(A_inv, dtype)]
        left, right = packed.part_pairs([scores[:, :, i : i + width] for i in range(0, scores.shape[2], width)], spread)
        rows.append(matmul.dot(packed.concat_lanes(left), packed.concat_rows(right)))  # [n, C, p C]
    if refs.v_new_over_beta is not None:
        rows.append(A_inv)
    rows.append(tile.write_packed(k, A_end, part))  # [n, K, p C]
    return packed.concat_lanes(packed.split_bf16(packed.concat_rows(rows), dtype))


def _pass_chunks(
    refs: GdnRefs, chunks: list[stage_chunks.StageChunk], part: tile.Heads, s: tile.Heads, static: FusedStatic
) -> Iterator[None]:
    """Write the outputs of some heads, and take their states through the chunks, one by one."""
    for chunk in chunks:
        rows, here = chunk.rows(s.C), part.in_chunk(chunk.index, s)
        # Pieces share a chunk, so each stores only its rows, as in `kernel`.
        stored = chunk.valid if static.varlen else None
        # After a product, whole columns of a state are not finite, so its first rows show it.
        search = slice(0, 8) if refs.initial_state is None or chunk.index else slice(None)
        chunk, S = chunk.state_in(_state_before(refs, chunk, part), chunk.carried, search)  # [heads, K, channels]
        if refs.h is not None:
            refs.h[chunk.index, part.values_at] = S.astype(refs.h.dtype)
        start = tile.head_columns(refs.start_prev[here.packs_at], part, S.shape[2])  # [heads, C, channels]
        q = None if refs.o is None else refs.queries_prev[here.keys_at]
        KS, QS = tile.read_state(refs.keys_prev[here.keys_at], q, S, part)
        yield
        v = layout.load_heads(refs.v, part.V, part.values_at, chunk.valid, rows).astype(jnp.float32)
        if refs.M is not None:
            # The channels of M have no values.
            v = packed.beside([v, jnp.zeros((*v.shape[:2], s.K), jnp.float32)])[..., : S.shape[2]]
        added = packed.multiply_packed(refs.left[here.packs_at], v - start * KS, part.p, refs.k.dtype)
        refs.state[part.values_at] = chunk.decay_out(start[:, -1:], chunk.ending) * S + added[:, -s.K :]
        results = [] if QS is None else [(refs.o, (static.scale * start) * QS + added[:, : s.C])]
        if refs.v_new_over_beta is not None:
            results.append((refs.v_new_over_beta, added[:, -s.K - s.C : -s.K]))
        for ref, x in results:
            layout.store_heads(ref, chunk.poisoned(x), stored, part.first, rows)
        yield


def _state_before(refs: GdnRefs, chunk: stage_chunks.StageChunk, part: tile.Heads) -> jax.Array:
    """Return the states of some heads before a chunk; M, which begins with the identity, is beside them."""
    if refs.M is None or chunk.index:
        return chunk_loop.load_state(refs, chunk, part.values_at)
    S = refs.state[part.values_at]
    before = chunk_loop.first_state(S[:, :, : part.V], refs, chunk, part.values_at)
    i, j = (lax.broadcasted_iota(jnp.int32, (part.heads, part.K, part.K), axis) for axis in (1, 2))
    identity = tile.indicator(i == j)
    M = jnp.where(chunk.span.first == 1, identity, S[:, :, part.map_lane :])
    return packed.beside([before, M])[..., : S.shape[2]]


def _store_for_next_step(refs: GdnRefs, q, k, staged: dict, inverses: dict, lefts: dict) -> None:
    """Store what the next grid step reads, last, because this one reads there what the one before stored."""
    if refs.A_inv_out is not None:
        n = refs.A_inv_out.shape[1]
        for heads, found in inverses.items():
            for i in range(heads.packs_at.start, heads.packs_at.stop):
                refs.A_inv_out[i // n, i % n] = found[-1][i - heads.packs_at.start]
    for part, left in lefts.items():
        refs.left[part.packs_at] = left
    if refs.keys is not None:
        handed = ("start_prev", refs.start), ("keys_prev", refs.keys), ("queries_prev", refs.queries)
        loads.store(refs, {name: ref[...] for name, ref in handed if ref is not None})
        loads.store(refs, {"keys": k, "queries": q})
    elif refs.keys_prev is not None:
        loads.store(refs, {"keys_prev": k, "queries_prev": q})
        refs = refs._replace(start=refs.start_prev)
    for part, values in staged.items():
        loads.store(refs, values, part.packs_at)


def plan(x: Operands, static: FusedStatic, outputs: tuple[str, ...]) -> dict[str, Any]:
    """Return the launch of the forward, as `kernel.launch_of` does, for what `supports` says."""
    static = static.in_long_spans()
    x, C, inverts, passes = x.in_spans_of(static), static.C, x.A_inv is None, {*outputs} != {"A_inv"}
    stages, scratch = 1 + inverts + passes, kernel.buffers(x, static, outputs)
    handed = {name: scratch[name] for name in ("start", "keys", "queries") if name in scratch}
    matrix, dtype = scratch["start"], x.k.dtype
    if not (inverts and passes):  # the inverse has no stage of its own, or is all that is requested
        scratch = {name: y for name, y in scratch.items() if name in (("state",) if passes else ("A", "blocks"))}
    if passes:
        rows = C * (("o" in outputs) + ("v_new_over_beta" in outputs)) + static.K
        scratch |= {f"{name}_prev": y for name, y in handed.items()}
        parts = 2 if dtype == jnp.bfloat16 else 1
        scratch["left"] = pltpu.VMEM((matrix[0], rows, parts * matrix[2]), dtype)
    if x.owner is not None:
        scratch["nonfinite_rows"] = max(1, stages - 1), static.chunks, C, 1
    return kernel.launch_of(x, static, outputs, _kernel, scratch, stages, stages - 1 if passes else None, 0)
