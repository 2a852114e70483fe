"""The backward for few heads, as one of many devices has: a grid step takes several chunks, the last one first.

The chain from the gradient of the state after a chunk to the gradient of the state before it has three products that
wait for one another. What needs no state, and the gradients of the tokens of chunks that are through, stand between
them. Both are computed for a group of chunks at once, as if they were more heads.
"""

import functools
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from chunkwise.fused_gdn import kernel_bwd, loads, tile, tile_bwd
from chunkwise.fused_gdn.operands import GdnRefs
from chunkwise.shared.kernels.spans import chunk_loop, layout, schedule, stage_chunks
from chunkwise.shared.kernels.spans.operands import FusedStatic, Operands

# Heads of a group of chunks.
GROUP = 8


class Group(NamedTuple):
    """What a group of chunks needs of its gradients; heads are the value heads of all of its chunks.

    Attributes:
      chunks: the chunks, in the order of their tokens.
      heads: the heads of all chunks, counted in the group.
      q, k: [key heads, C, K].
      do: [heads, C, V].
      A_inv: packed [n, C, p C].
      gate, decays, scores: as in `tile_bwd.token_gradients`.
      passed: for the chunks that the gradient of the state went through, the gradient of the state after the chunk, and
        the results of `tile_bwd.back_to_values`.
    """

    chunks: list[stage_chunks.StageChunk]
    heads: tile.Heads
    q: jax.Array
    k: jax.Array
    do: jax.Array
    A_inv: jax.Array
    gate: tile.Gates
    decays: list[jax.Array]
    scores: tuple[jax.Array, ...]
    passed: list[tuple[jax.Array, ...]]


def supports(x: Operands, static: FusedStatic) -> bool:
    """Return whether the launch is for these operands."""
    return static.in_even_spans().chunks > 1 and (x.owner is None or static.config.heads_bwd < 16)


def plan(x: Operands, static: FusedStatic, outputs: tuple[str, ...]) -> dict[str, Any]:
    """Return the launch of the backward, as `kernel_bwd.plan` does, for what `supports` says."""
    static = static.in_even_spans()
    return kernel_bwd.plan(x.in_spans_of(static), static, outputs, _kernel)


def _kernel(refs: GdnRefs, *, static: FusedStatic, s: tile.Heads) -> None:
    """Take the gradient of the state back through the chunks of a grid step."""
    results = refs.dq, refs.dk, refs.dv, refs.dg, refs.dbeta
    chunk_loop.run_backward_chunks(
        refs,
        functools.partial(_grid_step, static=static, s=s),
        static,
        not_finite=lambda x: kernel_bwd.not_finite(refs, s, x.rows(s.C)),
        results=lambda i: [x.at[i * s.C : (i + 1) * s.C] for x in results if x is not None],
    )


def _grid_step(
    refs: GdnRefs, chunks: list[stage_chunks.StageChunk], static: FusedStatic, s: tile.Heads
) -> list[stage_chunks.StageChunk]:
    """Run a grid step on its chunks, and return them as `chunk_loop.run_backward_chunks` asks."""
    loaded = [loads.load_chunk(refs, chunk.valid, s, static, chunk.rows(s.C)) for chunk in chunks]
    g, beta = (jnp.concatenate([x[i] for x in loaded], axis=1) for i in (2, 3))
    gates = tile.gate_sums_of(g, beta, s, refs.k.dtype != jnp.bfloat16, [x.masks for x in chunks])
    # Every chunk has masks of its own.
    size, groups = max(1, GROUP // s.heads) if chunks[0].masks is None else 1, []

    def prepare() -> Iterator[None]:
        for first in reversed(range(0, static.chunks, size)):
            at = slice(first, first + size)
            groups.append(_prepare(refs, chunks[at], loaded[at], gates, static, s))
            yield

    def pass_chunks() -> Iterator[None]:
        for group in groups:
            for i in reversed(range(len(group.chunks))):
                yield from _pass_chunk(refs, group, i, s.in_chunk(i, s), static)

    def finish() -> Iterator[None]:
        for group in groups:
            while len(group.passed) < len(group.chunks):
                yield
            yield from _finish(refs, group, [x[-1] for x in loaded], static, s)

    stages = dict(m=prepare(), p=pass_chunks(), f=finish() if refs.dq is not None else iter(()))
    schedule.interleave("m" + "pmf" * (3 * static.chunks), **stages)
    schedule.finish(stages["f"])
    return [x for group in groups for x in group.chunks]


def _prepare(refs, chunks: list[stage_chunks.StageChunk], loaded, gates: tile.Gates, static, s: tile.Heads) -> Group:
    """Return a group of chunks with what needs no state."""
    heads = s.in_chunk(chunks[0].index, s).over(len(chunks))
    q, k = (jnp.concatenate([x[i] for x in loaded]) for i in (0, 1))
    gate = tile.pack_gates(gates if chunks[0].masks is None else tile.select_chunk(gates, heads), heads)
    pairs, *decays = tile.boundary_decays(gate, heads, chunks[0].masks)
    scores = tile.scores([k, q], k, gate, pairs, heads)
    A_inv, do = stage_chunks.load_each(refs.A_inv, chunks), _load_tokens(chunks, refs.do, s)
    return Group(chunks, heads._replace(first=0, first_key=0), q, k, do, A_inv, gate, decays, scores, [])


def _load_tokens(chunks: list[stage_chunks.StageChunk], ref, s: tile.Heads) -> jax.Array:
    """Load values of the tokens of a group, [heads, C, V]."""
    return jnp.concatenate([layout.load_heads(ref, s.V, valid=x.valid, at=x.rows(s.C)) for x in chunks])


def _pass_chunk(refs, group: Group, i: int, part: tile.Heads, static: FusedStatic) -> Iterator[None]:
    """Take the gradient of the state back through chunk i of a group, whose heads in the group are `part`."""
    # After a product, whole columns of a gradient are not finite, so its first rows show it.
    last = group.chunks[i].index == static.chunks - 1
    search = slice(0, 8) if refs.dht is None or not last else slice(None)
    chunk, dS = group.chunks[i].state_in(refs.dstate[...], group.chunks[i].ending, search)
    values, packs = part.values_at, part.packs_at
    q, k, do = group.q[part.keys_at], group.k[part.keys_at], group.do[values]
    start, end, beta = (tile.head_columns(x[packs], part, part.V) for x in (*group.decays, group.gate.beta))
    _, QK, D = (x[packs] for x in group.scores)
    of_values = yield from tile_bwd.back_to_values(k, QK, D, group.A_inv[packs], do, dS, static.scale, end, beta, part)
    yield
    before = tile_bwd.back_to_state(q, k, do, of_values[-1], dS, static.scale, start, part)
    refs.dstate[...], group.chunks[i] = chunk.decay_out(before, chunk.carried), chunk
    group.passed.insert(0, (dS, *of_values))
    yield


def _finish(refs, group: Group, of_rounding: list, static: FusedStatic, s: tile.Heads) -> Iterator[None]:
    """Store the gradients of the tokens of a group."""
    dS, *of_values = (jnp.concatenate(x) for x in zip(*group.passed, strict=True))
    gradients = yield from tile_bwd.token_gradients(
        group.q, group.k, group.gate, group.decays, group.scores, stage_chunks.load_each(refs.h, group.chunks),
        _load_tokens(group.chunks, refs.v_new_over_beta, s), group.do, dS, of_values, static.scale, group.heads,
    )  # fmt: skip
    for i, chunk in enumerate(group.chunks):
        part = s.in_chunk(i, s)
        (dq, dk), dv = (x[part.keys_at] for x in gradients[:2]), gradients[2][part.values_at]
        *of_gates, dbeta = (x[:, part.values_at] for x in gradients[3:])
        if of_rounding[chunk.index] is not None:
            dbeta = dbeta * of_rounding[chunk.index]
        kernel_bwd.store(refs, (dq, dk, dv, *of_gates, dbeta), chunk, static, s)
    yield
