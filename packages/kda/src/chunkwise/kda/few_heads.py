"""The forward for few heads, as one of many devices has: a grid step takes several chunks.

The chain from the state before a chunk to the state after it is what few heads wait for. So all chunks of a grid step
are prepared, and their inverses made, at once, as if they were more heads; then the state goes through the chunks one
by one. The functions of `kernel` run on the Refs of one chunk.

Two stages share a grid step, as in `kernel`. In a long row they are three: the inverse has a stage of its own, so that
the state does not wait for it. What the first stage leaves for the third then lies in two slots, of even and of odd
grid steps.

A span is several chunks of a row that is one sequence, or of a packed sequence: a piece of so many chunks.
"""

import functools
from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from chunkwise.kda import kernel, loads
from chunkwise.kda.operands import KdaOperands, KdaRefs, KdaStatic
from chunkwise.shared import tuning
from chunkwise.shared.kernels import inverse
from chunkwise.shared.kernels.spans import chunk_loop, layout, schedule, stage_chunks


def supports(x: KdaOperands, static: KdaStatic) -> bool:
    """Return whether the launch is for these operands."""
    return x.A_inv is None and static.in_long_spans().chunks > 1


def plan(x: KdaOperands, static: KdaStatic, outputs: tuple[str, ...], operator: str) -> dict[str, Any]:
    """Return the launch of the forward, as `kernel.plan` does, for what `supports` says."""
    static = static.in_long_spans()
    return kernel.plan(x.in_spans_of(static), static, outputs, operator, _kernel)


def _kernel(refs: KdaRefs, *, static: KdaStatic) -> None:
    """Run the stages of a grid step, each on chunks of its own."""
    slots = refs.readers.shape[0]
    slot = lax.rem(pl.program_id(2), jnp.int32(slots))
    refs = layout.slice_refs(refs, dict.fromkeys(kernel.IN_SLOTS, slot))
    views = loads.of_chunks(refs, static, static.config.heads)
    chunk_loop.run_forward_chunks(
        refs,
        functools.partial(_grid_step, static=static),
        static,
        stages=1 + slots,
        transposed=True,
        tokens_not_finite=lambda x: loads.tokens_not_finite(views[x.index], static),
        values_not_finite=lambda x: loads.values_not_finite(views[x.index], static),
    )


def _grid_step(refs: KdaRefs, of_stages: list[list[stage_chunks.StageChunk]], static: KdaStatic) -> None:
    """Run all stages of a grid step on their chunks."""
    cur, *_, prev = of_stages
    views, p = loads.of_chunks(refs, static, static.config.heads), static.p
    firsts = range(0, static.config.heads, p)
    for view, chunk in zip(views, cur, strict=True):
        if chunk.masks is not None:
            loads.store_continuing(view.continuing, chunk.masks)
    gated, loaders, rounded = kernel.load_each(views, cur, static)
    staged: dict[tuple[int, int], Any] = {}
    inverses: list[Any] = [None]

    def prepare() -> Iterator[None]:
        for i, n in ((i, n) for n in firsts for i in range(static.chunks)):
            staged[i, n] = kernel.prepare(views[i], n, *loaders[i], *gated[i], cur[i].valid, cur[i].masks, static)
            yield

    inverting, preparing = _invert(refs, inverses), prepare()
    passing = _pass_chunks(refs, views, prev, static, inverting, inverses)
    schedule.interleave(_order(static, 2 if refs.inverses is None else 3), x=inverting, p=passing, m=preparing)
    schedule.finish(preparing)
    A = [jnp.concatenate([staged[i, n][1][:, static.C :] for n in firsts]) * rounded[i][1] for i in range(len(cur))]
    blocks = None if refs.blocks is None else inverse.begin_inverse(jnp.concatenate(A))
    for remaining in (inverting, passing):
        schedule.finish(remaining)
    # Stored late, because other stages read from the same scratch memory what the grid step before stored.
    refs.A[...] = jnp.concatenate(A)
    if refs.blocks is not None:
        refs.blocks[...] = blocks
    if refs.inverses is not None:
        refs.inverses[...] = inverses[-1]
    for i in range(0 if refs.A_inv_out is None else static.chunks):
        refs.A_inv_out[i] = inverses[-1][i * len(firsts) : (i + 1) * len(firsts)]
    for (i, n), (boundary, scores) in staged.items():
        factors, beta_rows = rounded[i]
        kernel.store_pack(views[i], n, boundary, scores, beta_rows, factors[n : n + p], static)
    kernel.prepare_beyond_base(refs, views, cur, gated, [rows for _, rows in rounded], [*staged], static)


def _order(static: KdaStatic, stages: int) -> str:
    """Return the order of the stages: inverses x, the state p, and packs that are prepared m."""
    packs, chunks = static.chunks * static.config.heads // static.p, static.chunks
    # Without a stage of its own, the inverse is at the beginning of p.
    otherwise = "pm" * packs if stages == 2 else "pmpmxpxmx" + ("p" * (chunks // 2) + "mx") * packs
    return tuning.find_order("chunkwise.kda", f"{stages} stages, {chunks} chunks", static.order_size, otherwise)


def _invert(refs: KdaRefs, inverses: list) -> Iterator[None]:
    """Append the inverses of the chunks of a stage to `inverses`, unfinished ones before them."""
    A, parts = refs.A[...], 2 if refs.readers.dtype == jnp.bfloat16 else 3
    if refs.blocks is None:
        blocks = inverse.begin_inverse(A)
        yield
    else:
        blocks = refs.blocks[...]
    for A_inv in inverse.block_doubling(blocks, A, parts):
        inverses.append(A_inv)
        yield


def _pass_chunks(
    refs: KdaRefs, views: list[KdaRefs], prev: list, static: KdaStatic, inverting: Iterator, inverses: list
) -> Iterator[None]:
    """Take the state through the chunks prev, some heads behind others; yield where other products may stand."""
    if refs.inverses is None:
        yield from inverting
    A_inv = inverses[-1] if refs.inverses is None else refs.inverses[...]
    n = static.config.heads // static.p

    def pass_heads(heads: slice) -> Iterator[None]:
        for i, (x, chunk) in enumerate(zip(views, prev, strict=True)):
            S = chunk_loop.load_state(refs, chunk, static.tiles(heads))
            of_chunk = A_inv[i * n : (i + 1) * n]
            yield from kernel.pass_state(x, *chunk.state_in(S, chunk.carried), of_chunk, heads, static)
            yield

    yield from schedule.software_pipeline(pass_heads(x) for x in kernel.stages_of(static, kernel.STAGE))
