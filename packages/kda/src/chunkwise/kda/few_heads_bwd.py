"""The backward for few heads, as one of many devices has: a grid step takes several chunks, the last one first.

The chain from the gradient of the state after a chunk to the gradient of the state before it has three products that
wait for one another. What needs no state, and the gradients of the tokens of chunks that are through, stand between
them. Both are computed for a group of chunks at once, as if they were more heads, by the functions of `kernel_bwd`.
"""

import functools
from collections.abc import Generator, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from chunkwise.kda import kernel_bwd, loads, tile_bwd
from chunkwise.kda.operands import KdaOperands, KdaRefs, KdaStatic
from chunkwise.shared.kernels.spans import chunk_loop, schedule, stage_chunks


class KdaGroup(NamedTuple):
    """A group of chunks.

    Attributes:
      chunks: the chunks, in the order of their tokens.
      views: the Refs of every chunk.
      refs: the Refs that the chunks share, with the decays of all of them.
      x: what their tokens alone give, with the heads of all chunks.
      A_inv, scores: packed [n, C, p C] and [n, 2 C, p C].
      of_outputs: the result of `tile_bwd.through_outputs`.
      passed: for the chunks that the gradient of the state went through, in the order of their tokens, the gradient of
        the state after the chunk, and the results of `tile_bwd.back_to_values`.
    """

    chunks: list[stage_chunks.StageChunk]
    views: list[KdaRefs]
    refs: KdaRefs
    x: loads.Loaded
    A_inv: jax.Array
    scores: jax.Array
    of_outputs: jax.Array
    passed: list[tuple[jax.Array, ...]]


def supports(x: KdaOperands, static: KdaStatic) -> bool:
    """Return whether the launch is for these operands."""
    return static.in_even_spans().chunks > 1


def plan(x: KdaOperands, static: KdaStatic, outputs: tuple[str, ...], operator: str) -> dict[str, Any]:
    """Return the launch of the backward, as `kernel_bwd.plan` does, for what `supports` says."""
    static = static.in_even_spans()
    return kernel_bwd.plan(x.in_spans_of(static), static, outputs, operator, _kernel)


def _kernel(refs: KdaRefs, *, static: KdaStatic) -> None:
    """Take the gradient of the state back through the chunks of a grid step."""
    kernel_bwd.clear_sums(refs)
    views = loads.of_chunks(refs, static, static.config.heads_bwd)
    chunk_loop.run_backward_chunks(
        refs,
        functools.partial(_grid_step, static=static),
        static,
        not_finite=lambda x: kernel_bwd.not_finite(views[x.index], static),
        results=lambda i: kernel_bwd.results_of(views[i], static)[0],
        in_lanes=lambda i: kernel_bwd.results_of(views[i], static)[1],
        sums=(refs.dlaw,),
    )


def _grid_step(
    refs: KdaRefs, chunks: list[stage_chunks.StageChunk], static: KdaStatic
) -> list[stage_chunks.StageChunk]:
    """Run a grid step on its chunks, and return them as `chunk_loop.run_backward_chunks` asks."""
    views, groups, finished = loads.of_chunks(refs, static, static.config.heads_bwd), [], []
    # Every chunk has masks of its own.
    size = max(1, kernel_bwd.GROUP // static.config.heads_bwd) if chunks[0].masks is None else 1

    def prepare() -> Iterator[None]:
        for first in reversed(range(0, static.chunks, size)):
            at = slice(first, first + size)
            groups.append(_prepare(refs, chunks[at], views[at], static))
            yield

    def pass_chunks() -> Iterator[None]:
        for group in groups:
            for i in reversed(range(len(group.chunks))):
                yield from _pass_chunk(refs, group, i, static)

    def finish() -> Iterator[None]:
        for group in groups:
            while len(group.passed) < len(group.chunks):
                yield
            finished.append((group, (yield from _finish(group, static))))

    stages = dict(m=prepare(), p=pass_chunks(), f=finish() if refs.dq is not None else iter(()))
    # The next group is prepared while the gradient of the state goes back through a group.
    each = "pmf" + "pf" * (3 * size - 1)
    schedule.interleave("m" + each * -(-static.chunks // size), **stages)
    schedule.finish(stages["f"])
    for group, found in finished:
        kernel_bwd.store_beyond_base(
            group.refs, group.x, *found, list(zip(group.views, group.chunks, strict=True)), static
        )
    return [x for group in groups for x in group.chunks]


def _joined(trees: list) -> Any:
    """Return arrays of several chunks, heads first, as arrays of more heads."""
    return jax.tree.map(lambda *x: jnp.concatenate(x), *trees)


def _prepare(refs, chunks: list[stage_chunks.StageChunk], views: list, static: KdaStatic) -> KdaGroup:
    """Return a group of chunks with what needs no state."""
    x = _joined(
        [loads.load_chunk(view, chunk.valid, chunk.masks, static) for view, chunk in zip(views, chunks, strict=True)]
    )
    A_inv, scores = (stage_chunks.load_each(ref, chunks) for ref in (refs.A_inv, refs.scores))
    each = refs.decays.shape[1] // static.chunks
    at = slice(None), slice(chunks[0].index * each, (chunks[-1].index + 1) * each)
    of_outputs = tile_bwd.through_outputs(scores, x.do, refs.do.dtype, static.values)
    return KdaGroup(chunks, views, refs._replace(decays=refs.decays.at[at]), x, A_inv, scores, of_outputs, [])


def _pass_chunk(refs, group: KdaGroup, i: int, static: KdaStatic) -> Iterator[None]:
    """Take the gradient of the state back through a chunk of a group."""
    heads, dtype = static.config.heads_bwd, refs.do.dtype
    chunk, dS = group.chunks[i].state_in(refs.dstate[...], group.chunks[i].ending)
    at, packs = slice(i * heads, (i + 1) * heads), slice(i * heads // static.p, (i + 1) * heads // static.p)
    x = group.x.of_heads(at, static)
    of_values = yield from tile_bwd.back_to_values(
        x.k, x.beta, x.boundary, group.A_inv[packs], group.of_outputs[static.tiles(at)], dS, dtype, static.keys,
        static.values,
    )  # fmt: skip
    yield
    before = tile_bwd.back_to_state(x.q, x.e, x.boundary, x.do, of_values[-1], dS, dtype, static.keys)
    refs.dstate[...], group.chunks[i] = chunk.decay_out(before, chunk.carried), chunk
    group.passed.insert(0, (dS, *of_values))
    yield


def _finish(group: KdaGroup, static: KdaStatic) -> Generator[None, None, tuple]:
    """Store the gradients of the tokens of a group, and return the results of `kernel_bwd.token_gradients`."""
    dS, *of_values = _joined(group.passed)
    each = zip(group.views, group.chunks, strict=True)
    v_new_over_beta = [static.values.load(view.v_new_over_beta, valid=x.valid) for view, x in each]
    residuals = stage_chunks.load_each(group.refs.h, group.chunks), _joined(v_new_over_beta), group.scores
    found = yield from kernel_bwd.token_gradients(
        group.refs, group.x, residuals, of_values, dS, group.chunks[0].same, static
    )
    heads = static.config.heads_bwd
    for i, (view, chunk) in enumerate(zip(group.views, group.chunks, strict=True)):
        at = slice(i * heads, (i + 1) * heads)
        kernel_bwd.store(view, found[0].of_heads(at, static), group.x.k[static.tiles(at)], chunk, static)
    yield
    return found
