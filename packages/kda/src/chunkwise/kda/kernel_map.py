"""The map that tokens apply to a state, in one launch of two chunks a grid step: kernel body and launcher.

With the names of kernel.py, A_inv applied to values and decayed erase keys needs no state:

    u = A_inv V        w = A_inv (E e^G)        S' = e^G_last S - (K e^(G_last - G))^T B (w S - u)

So the state goes through a chunk with two products that wait for one another, instead of three, and V and E e^G are
exact operands, so that the products with A_inv need fewer parts. A_inv, w and w S - u keep 16 bits: where keys repeat,
their rows oscillate, and sums over them cancel.

A state has K more channels, which have no values: from the identity they become M, the matrix that takes a state
through all tokens. Here states lie as [K, V + K], and not transposed, because then a product has a column of the matrix
unit for every channel. The decays over a chunk multiply rows, and the keys that write are transposed.

A grid step has three stages, each on the two chunks of another grid step: one prepares, one makes A_inv, u and w, and
the last one takes the state through its chunks, one after the other. The scores of queries are made here, too: the
operator behind the map then needs no decay between two rows of a chunk.
"""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from chunkwise.kda import kernel, loads, tile
from chunkwise.kda.operands import KdaOperands, KdaRefs, KdaStatic
from chunkwise.shared import compat, tuning
from chunkwise.shared.kernels import inverse, matmul, packed
from chunkwise.shared.kernels.spans import chunk_loop, layout, schedule, stage_chunks

# Chunks of a grid step, its stages, and heads that take the state through a chunk together.
CHUNKS, STAGES, TOGETHER = 2, 3, 4


def supports(static: KdaStatic, dtype) -> bool:
    """Return whether the launch is for these rows, each of one sequence: long ones of many heads, in bfloat16.

    Other maps are made by `kernel`, which takes the identity beside the states, as are those of narrow matrix units,
    for which nobody has compared the two.
    """
    long = static.in_long_spans().chunks == 1 and static.spans >= 4 * CHUNKS
    whole = static.readable % (CHUNKS * static.C) == 0
    wide = compat.matrix_columns() > 128
    return long and whole and wide and dtype == jnp.bfloat16 and static.p == 2 and 2 * static.C == packed.LANES


def _map_kernel(refs: KdaRefs, *, static: KdaStatic) -> None:
    """Take the state through the chunks prev, make the inverses of the chunks before, and prepare the chunks cur."""
    first, _, prev = chunk_loop.current_spans(refs.table, STAGES, static)

    # In the first grid steps scratch memory holds anything; the first span of a row resets the state.
    @pl.when(prev.first == 1)
    def _():
        heads, KL, VL = static.config.heads, static.keys.size, static.values.size
        shape = heads, static.V, static.K
        start = chunk_loop.empty_state(shape) if refs.initial_state is None else refs.initial_state[...]
        i, j = (lax.broadcasted_iota(jnp.int32, (heads, KL, KL), axis) for axis in (1, 2))
        refs.state[:, :, :VL] = jnp.swapaxes(static.keys.open_state(start, VL), 1, 2)
        refs.state[:, :, VL:] = jnp.where(i == j, jnp.float32(1.0), jnp.float32(0.0))

    # What the last stage reads was prepared two grid steps earlier, in the slot of even or of odd grid steps.
    slot = lax.rem(pl.program_id(2), jnp.int32(2))
    of_slot = layout.slice_refs(refs, dict.fromkeys(("ends", "through"), slot))
    _grid_step(of_slot, stage_chunks.chunks_of(first, static), static)
    channels, rows = (slice(static.values.size), slice(static.values.size, None)), (static.V, static.K)

    @pl.when(prev.of_chunk(jnp.int32(CHUNKS - 1)).last == 1)
    def _():
        states = [jnp.swapaxes(refs.state[:, :, x], 1, 2) for x in channels]
        refs.ht[...], refs.M[...] = (static.keys.close_state(x, n) for x, n in zip(states, rows, strict=True))


def _grid_step(refs: KdaRefs, cur: list[stage_chunks.StageChunk], static: KdaStatic) -> None:
    """Run the three stages; the chunks `cur` are prepared.

    Every product of the inverses, "x", waits for the one before. Between two of them, packs are prepared, "m", and the
    state goes on, "p". Applied inverses, "a", replace what takes the state of their heads on, so they come after it.
    """
    views, heads, p = loads.of_chunks(refs, static, static.config.heads), static.config.heads, static.p
    gated, loaders, rounded = kernel.load_each(views, cur, static)
    packs = [(i, n) for n in range(0, heads, p) for i in range(CHUNKS)]
    staged: list[tuple] = []
    inverses: list[jax.Array] = []
    lasts = [jnp.swapaxes(x.through[...].reshape(heads, -1), 0, 1) for x in views]  # each [KL, heads]

    def prepare() -> Iterator[None]:
        for i, n in packs:
            staged.append(
                kernel.prepare(
                    views[i], n, *loaders[i], *gated[i], valid=None, masks=None, static=static, upright=False
                )
            )
            yield

    def invert() -> Iterator[None]:
        # Scores become upright here, and not where they are made: the inverses wait for them, so that the compiler
        # does not leave all transpositions for the end of the grid step.
        for i, n in packs:
            make_upright(views[i], n, static)
        blocks = inverse.begin_inverse(refs.A[...])
        yield
        for A_inv in inverse.block_doubling(blocks, refs.A[...], 2):
            inverses.append(A_inv)
            yield

    inverting = invert()

    def apply_inverses() -> Iterator[None]:
        schedule.finish(inverting)
        for i, n in packs:
            at = (i * heads + n) // p
            apply_inverse(views[i], inverses[-1][at : at + 1], n, static)
            yield

    def pass_heads(part: slice) -> Iterator[None]:
        for x, last in zip(views, lasts, strict=True):
            yield from pass_chunk(x, last, part, static)
            yield

    passing = schedule.software_pipeline(pass_heads(part) for part in kernel.stages_of(static, TOGETHER))
    applying, preparing = apply_inverses(), prepare()
    order = "x" + "mp" * 8 + "xm" * 4
    order = tuning.find_order("chunkwise.kda", "map of two", static.order_size, order)
    schedule.interleave(order, x=inverting, p=passing, a=applying, m=preparing)
    for remaining in (passing, applying, preparing):
        schedule.finish(remaining)
    # Stored late, because other stages read from the same scratch memory what the grid step before stored.
    for (i, n), x in zip(packs, staged, strict=True):
        factors, beta_rows = rounded[i]
        store_pack(views[i], n, *x, beta_rows, factors[n : n + p], static)
    kernel.prepare_beyond_base(refs, views, cur, gated, [rows for _, rows in rounded], packs, static)


def store_pack(refs: KdaRefs, n: int, boundary, scores, beta_rows, factors, static: KdaStatic) -> None:
    """Store the results of `kernel.prepare`; the other arguments are as in `kernel.store_pack`."""
    (readers, ends, through), pack, packs = boundary, slice(n, n + static.p), slice(n // static.p, n // static.p + 1)
    refs.readers[pack], refs.through[pack] = readers.astype(refs.readers.dtype), through
    refs.ends[pack] = ends if factors[0] is None else ends * jnp.concatenate(factors)
    refs.scores_prev[pack], refs.beta_prev[packs] = scores, beta_rows[packs]


def make_upright(refs: KdaRefs, n: int, static: KdaStatic) -> None:
    """Store the scores, and the matrix to invert, of the pack that begins with head n."""
    packs = slice(n // static.p, n // static.p + 1)
    scores = tile.transposed(refs.scores_prev[n : n + static.p])  # [1, 2 C, p C]
    refs.scores_out[packs], refs.A[packs] = scores, scores[:, static.C :] * refs.beta_prev[packs]


def apply_inverse(refs: KdaRefs, A_inv, n: int, static: KdaStatic) -> None:
    """Compute and store u and w of the pack that begins with head n, and store its A_inv [1, C, p C]."""
    p, dtype, pack = static.p, refs.v.dtype, slice(n, n + static.p)
    refs.A_inv_out[n // p : n // p + 1] = A_inv
    parts = packed.concat_lanes(packed.split_bf16(A_inv, dtype))
    v = static.values.load(refs.v, pack) if refs.w is None else loads.load_values(refs, None, static, pack)
    refs.u[pack] = packed.multiply_packed(parts, v, p, dtype)  # [p, C, VL]
    w = packed.multiply_packed(parts, refs.readers[pack], p, dtype)  # [p, C, KL]
    refs.erase_new[pack] = packed.concat_rows(packed.split_bf16(w, dtype))


def pass_chunk(refs: KdaRefs, last, part: slice, static: KdaStatic) -> Iterator[None]:
    """Take the state of some heads through prev, in two products that wait for one another.

    `last` are the decays over prev of all heads [KL, heads].
    """
    C, VL, dtype, S = static.C, static.values.size, refs.v.dtype, refs.state[part]  # [h, KL, VL + KL]
    product = matmul.dot(refs.erase_new[part], S.astype(dtype))  # [h, 2 C, VL + KL]
    yield
    product = product[:, :C] + product[:, C:]
    taken = packed.concat_lanes([product[:, :, :VL] - refs.u[part], product[:, :, VL:]])
    high, low = packed.split_bf16(taken, dtype)
    written = matmul.dot(end_columns(refs.ends[part], dtype), packed.concat_rows([high, low, high]))  # [h, KL, VL + KL]
    last = jnp.stack([last[:, i : i + 1] for i in range(part.start, part.stop)])  # [h, KL, 1]
    refs.state[part] = last * S - written


def end_columns(ends, dtype) -> jax.Array:
    """Return the keys that write [h, C, K] transposed: their first parts twice, and their second parts, [h, K, 3 C].

    Two heads at a time fill the registers that are transposed.
    """
    h, C, K = ends.shape
    columns, first = jnp.swapaxes(ends.reshape(h // 2, 2 * C, K), 1, 2), packed.lane_index(2 * C) < C
    high, low = packed.split_bf16(columns, dtype)  # each [h / 2, K, 2 C]
    other_high, other_low = packed.rotate(high, C), packed.rotate(low, C)
    even = packed.concat_lanes([jnp.where(first, high, other_high), low])
    odd = packed.concat_lanes([jnp.where(first, other_high, high), other_low])
    return jnp.stack([x[i] for i in range(h // 2) for x in (even, odd)])[:, :, : 3 * C]


def plan(x: KdaOperands, static: KdaStatic, outputs: tuple[str, ...], operator: str) -> dict[str, Any]:
    """Return the launch of the kernel, which has one head a tile, as `kernel.plan` does, for a map."""
    static, C, p, dtype = static.in_spans_of(CHUNKS), static.C, static.p, x.v.dtype
    KL, VL, heads = static.keys.size, static.values.size, CHUNKS * static.config.heads
    scratch = {
        "state": (static.config.heads, KL, VL + KL),
        "decays": loads.decays_scratch(heads, static, 1 if static.may_forget else static.base),
        "readers": pltpu.VMEM((heads, C, KL), dtype),
        "ends": (2, heads, C, KL),
        "scores_prev": (heads, C, 2 * C),
        "beta_prev": (heads // p, 1, p * C),
        "through": (2, heads, 1, KL),
        "A": (heads // p, C, p * C),
        "u": (heads, C, VL),
        "erase_new": pltpu.VMEM((heads, 2 * C, KL), dtype),
    }
    return kernel.plan(x, static, outputs, operator, _map_kernel, scratch)
