"""The forward for few heads, as one of many devices has: a grid step takes several chunks.

The chain from the state before a chunk to the state after it is what few heads wait for. So all chunks of a grid step
are prepared, and their inverses made, at once, as if they were more heads; then the state goes through the chunks one
by one. The functions of `kernel` run on the Refs of one chunk.

A span is several chunks of a row that is one sequence, or of a packed sequence: a piece of so many chunks.
"""

import functools
from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp
from jax.experimental import pallas as pl

from chunkwise.kda import kernel, loads
from chunkwise.kda.operands import KdaOperands, KdaStatic
from chunkwise.shared import tuning
from chunkwise.shared.kernels import inverse
from chunkwise.shared.kernels.spans import chunk_loop, schedule, stage_chunks


def takes(x: KdaOperands, static: KdaStatic) -> bool:
    """Return whether the launch is for these operands."""
    return x.A_inv is None and static.in_long_spans().chunks > 1


def plan(x: KdaOperands, static: KdaStatic, outputs: tuple[str, ...], operator: str) -> dict[str, Any]:
    """Return the launch of the forward, as `kernel.plan` does, for what `takes` says."""
    static = static.in_long_spans()
    return kernel.plan(x.in_spans_of(static), static, outputs, operator, _kernel)


def _kernel(refs: kernel.KdaFwdRefs, *, static: KdaStatic) -> None:
    """Take the state through the chunks prev, and prepare the chunks cur, of the next grid step."""
    views = loads.of_chunks(refs, static, static.config.heads)
    chunk_loop.run_forward_chunks(
        refs,
        functools.partial(_grid_step, static=static),
        static,
        stages=2,
        transposed=True,
        tokens_not_finite=lambda x: loads.tokens_not_finite(views[x.index], static),
        values_not_finite=lambda x: loads.values_not_finite(views[x.index], static),
    )


def _grid_step(refs: kernel.KdaFwdRefs, of_stages: list[list[stage_chunks.StageChunk]], static: KdaStatic) -> None:
    """Run both stages of a grid step on their chunks."""
    cur, prev = of_stages
    views, p = loads.of_chunks(refs, static, static.config.heads), static.p
    firsts, packs = range(0, static.config.heads, p), static.config.heads // p
    for view, chunk in zip(views, cur, strict=True):
        if chunk.masks is not None:
            loads.store_continuing(view.continuing, chunk.masks)
    gated = [loads.load_gates(x, chunk.valid, static) for x, chunk in zip(views, cur, strict=True)]
    loaders = [kernel.by_head(x, chunk.valid, static) for x, chunk in zip(views, cur, strict=True)]
    rounded = [
        kernel.rounded_betas(x, load[1], betas, chunk.valid, static)
        for x, load, (_, betas), chunk in zip(views, loaders, gated, cur, strict=True)
    ]
    staged: dict[tuple[int, int], Any] = {}

    def prepare() -> Iterator[None]:
        for i, n in ((i, n) for n in firsts for i in range(static.chunks)):
            staged[i, n] = kernel.prepare(views[i], n, *loaders[i], *gated[i], cur[i].valid, cur[i].masks, static)
            yield

    passing, preparing = _pass_chunks(refs, views, prev, static), prepare()
    size = static.config.heads, static.C, static.K
    order = tuning.find_order("chunkwise.kda", f"{static.chunks} chunks", size, "pm" * (packs * static.chunks))
    schedule.interleave(order, p=passing, m=preparing)
    for _ in preparing:
        pass
    A = [jnp.concatenate([staged[i, n][1][:, static.C :] for n in firsts]) * rounded[i][1] for i in range(len(cur))]
    blocks = inverse.begin_inverse(jnp.concatenate(A))
    for _ in passing:
        pass
    # Stored late, because prev is read from the same scratch memory until the state has gone through it.
    refs.blocks[...], refs.A[...] = blocks, jnp.concatenate(A)
    for (i, n), (boundary, scores) in staged.items():
        factors, beta_rows = rounded[i]
        kernel.store_pack(views[i], n, boundary, scores, beta_rows, factors[n : n + p], static)
    if refs.exact_levels is None:
        return

    @pl.when(loads.beyond_base(refs.decays, range(static.chunks * static.config.heads), static.K))
    def _():
        for i, n in staged:
            again = functools.partial(
                kernel.prepare_exactly, views[i], n, *gated[i], rounded[i][1], cur[i].valid, cur[i].masks, static
            )
            pl.when(loads.beyond_base(views[i].decays, range(n, n + p), static.K))(again)


def _pass_chunks(refs: kernel.KdaFwdRefs, views: list, prev: list, static: KdaStatic) -> Iterator[None]:
    """Finish the inverses of prev and take the state through prev; yield where other products may stand."""
    A_inv: Any = None
    parts = 2 if refs.readers.dtype == jnp.bfloat16 else 3
    for product in inverse.block_doubling(refs.blocks[...], refs.A[...], parts):
        A_inv = product  # the last value is the inverse
        yield
    n = static.config.heads // static.p
    for i, (x, chunk) in enumerate(zip(views, prev, strict=True)):
        of_chunk = A_inv[i * n : (i + 1) * n]
        if x.A_inv_out is not None:
            x.A_inv_out[...] = of_chunk
        yield from schedule.software_pipeline(
            kernel.pass_state(
                x, *chunk.take(chunk_loop.load_state(refs, chunk, stage), chunk.carried), of_chunk, stage, static
            )
            for stage in kernel.stages_of(static, kernel.HALF_STAGE)
        )
