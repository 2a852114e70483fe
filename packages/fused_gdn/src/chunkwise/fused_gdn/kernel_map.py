"""The map that tokens apply to a state, in one launch without queries and outputs: kernel body and launcher.

With the names of kernel.py, A_inv applied to values and keys needs no state:

    u = e^(G_last - G) B A_inv V        w = -e^(G_last - G) B A_inv e^G K        S' = e^G_last S + K^T (u + w S)

So a chunk takes three grid steps: one prepares it, the next makes its A_inv, u and w, and the last takes the state
through it, with two products that wait for one another instead of three. Where the tensors are bfloat16, V and K are
exact operands, so that the products with A_inv need fewer parts. A_inv and u + w S keep 16 bits, because sums over them
cancel; w is rounded in its product as the state is there.

A state has K more channels, which have no values: from the identity they become M, the matrix that takes a state
through all tokens.

A grid step takes two chunks where `kernel` does. Each stage works on the chunks of another grid step, so only the state
goes from the first chunk to the second one, and an order puts products of one between those of the other.
"""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from chunkwise.fused_gdn import kernel, loads, tile
from chunkwise.fused_gdn.operands import GdnRefs
from chunkwise.shared import tuning
from chunkwise.shared.kernels import inverse, matmul, packed, tiles
from chunkwise.shared.kernels.spans import chunk_loop, chunk_spans, layout, schedule, stage_chunks
from chunkwise.shared.kernels.spans.operands import FusedStatic, Operands


def _map_kernel(refs: GdnRefs, *, static: FusedStatic, s: tile.Heads) -> None:
    """Take the state through the chunk prev, multiply the chunk inverted by its A_inv, and prepare the chunk cur."""
    spans = *_, prev = chunk_loop.current_spans(refs.table, 3, static)

    # In the first grid steps scratch memory holds anything; the first span of a sequence resets the state.
    @pl.when(prev.first == 1)
    def _():
        shape = s.heads, s.K, s.V
        start = chunk_loop.empty_state(shape) if refs.initial_state is None else refs.initial_state[...]
        i, j = (lax.broadcasted_iota(jnp.int32, (s.heads, s.K, s.K), axis) for axis in (1, 2))
        refs.state[:, :, : s.map_lane], refs.state[:, :, s.map_lane :] = packed.whole(start), tile.indicator(i == j)

    if static.chunks > 1:
        _two_chunks(refs, static, s)
    else:
        chunk_loop.run_variant(functools.partial(_grid_step, refs, spans, static=static, s=s), refs, spans, static)

    @pl.when(prev.of_chunk(jnp.int32(static.chunks - 1)).last == 1)
    def _():
        refs.ht[...], refs.M[...] = refs.state[:, :, : s.V], refs.state[:, :, s.map_lane :]


def parts_of(s: tile.Heads) -> tuple[int, int]:
    """Return how many times heads take the state on, and how many times heads are prepared for each of them."""
    stages = s.split(kernel.STAGE)
    return len(stages), len(stages[0].split(kernel.STAGE // 2))


def _two_chunks(refs: GdnRefs, static: FusedStatic, s: tile.Heads) -> None:
    """Run the stages of a grid step of two chunks; those of the second chunk have capital letters in the order.

    What the stages of a chunk prepare is stored at once, so an order must not prepare heads before "a" has read what is
    stored of them. And the state of these heads must be through the first chunk before it enters the second one.
    """
    stages, keys = {}, []
    for index, own in enumerate(loads.of_chunks(refs, s, static.chunks)):
        _, k, g, beta, _ = loads.load_chunk(own, None, s, static)
        each = _stages(own, k, g, beta, None, None, functools.partial(loads.store, own), s)
        keys.append((own, k))
        stages |= {name.upper() if index else name: stage for name, stage in each.items()}
    n, parts = parts_of(s)
    rest = ("a" + "m" * parts) * n
    order = "mM" + "xXp" * (n + 1) + rest + "P" * (n + 1) + rest.upper()
    order = tuning.find_order("chunkwise.fused_gdn", "map of two", (s.heads, s.C, s.K), order)
    schedule.interleave(order, **stages)
    for own, k in keys:
        hand_on(own, k)


def _grid_step(
    refs: GdnRefs, spans: list[chunk_spans.Span], rows: stage_chunks.Rows, static: FusedStatic, s: tile.Heads
) -> None:
    """Run the stages of a grid step of one chunk, in the variant for these rows of the three chunks."""
    owners = refs.owner, refs.owner_second, refs.owner_prev
    cur, inverted, prev = (stage_chunks.stage_chunk(span, rows, s.C, x) for span, x in zip(spans, owners, strict=True))
    cur = cur.isolate(functools.partial(loads.tokens_not_finite, refs, s, refs.k), stages=3)
    not_finite = lambda: jnp.maximum(refs.nonfinite_rows[...], loads.values_not_finite(refs, s))
    inverted = inverted.isolate(not_finite, stages=3)
    prev = prev.isolate(lambda: refs.nonfinite_prev[...], (refs.state, prev.carried), stages=3)
    (_, k, g, beta, _), prepared = loads.load_chunk(refs, cur.valid, s, static), []
    stages = _stages(refs, k, g, beta, cur.masks, inverted.valid, lambda *x: prepared.append(x), s)
    n, parts = parts_of(s)
    order = "m" + "xpm" * (n * parts) + "p" + "a" * n
    schedule.interleave(tuning.find_order("chunkwise.fused_gdn", "map", (s.heads, s.C, s.K), order), **stages)
    prev.poison((), (refs.state, prev.ending))
    if rows is stage_chunks.Rows.MIXED:
        refs.nonfinite_rows[...], refs.nonfinite_prev[...] = cur.nonfinite_rows, inverted.nonfinite_rows
    # The next grid steps read these from scratch memory. They are stored last, because this grid step reads there the
    # arrays of earlier chunks.
    if refs.owner is not None:
        refs.owner_prev[...], refs.owner_second[...] = refs.owner_second[...], refs.owner[...]
    hand_on(refs, k)
    for x in prepared:
        loads.store(refs, *x)


def _stages(
    refs: GdnRefs, k, g, beta, masks, valid, keep: Callable[[dict[str, jax.Array], slice], None], s: tile.Heads
) -> dict[str, Iterator[None]]:
    """Return the stages of a grid step, or of one of its two chunks, by their letters in an order.

    The matrix unit takes products in the order of the program, and where one waits, all wait. Every product of the
    inverse, "x", waits for the one before. Between two of them, some heads take the state on, "p", or are prepared,
    "m", after the gates, which are the first "m". Stage n reads what takes its state on until "p" of number n + 2;
    "a" of number n + 1 overwrites it, so it must come later.

    Args:
      refs: the Refs of the chunks that the stages work on.
      k, g, beta: of the chunk to prepare, as `loads.load_chunk` returns them; `masks` are of the same chunk.
      valid: rows of the values of the chunk inverted that may be read; None for all rows.
      keep: called with what `prepare` returns for some heads, and their packs.
      s: all heads.
    """
    stages, exact, inverses = s.split(kernel.STAGE), k.dtype != jnp.bfloat16, []
    inverting = loads.invert(refs, ..., k.dtype, inverses)

    def prepare_heads() -> Iterator[None]:
        gates = tile.gate_sums(g, beta, s, exact, masks)
        yield
        for part in (part for stage in stages for part in stage.split(kernel.STAGE // 2)):
            keep(prepare(k, gates, part, masks), part.packs_at)
            yield

    def apply_inverses() -> Iterator[None]:
        schedule.finish(inverting)
        for stage in stages:
            apply_inverse(refs, inverses[-1], valid, stage)
            yield

    passing = schedule.software_pipeline(pass_chunk(refs, stage) for stage in stages)
    return {"x": inverting, "p": passing, "m": prepare_heads(), "a": apply_inverses()}


def prepare(k, gates: tile.Gates, part: tile.Heads, masks) -> dict[str, jax.Array]:
    """Return the arrays of some heads of cur that the next grid step needs, by the names of Refs in scratch memory."""
    g, k = tile.pack_gates(gates, part), k[part.keys_at]
    pairs, from_start, to_end = tile.boundary_decays(g, part, masks)
    KK, D = tile.scores([k], k, g, pairs, part)  # [n, C, p C]
    A = KK * (D * g.beta_rows)
    start = jnp.exp2(sum(g.G_rows))  # [n, 1, p C]
    if masks is not None:
        start = jnp.where(packed.concat_lanes([tiles.to_row(tile.indicator(masks.carried))] * part.p) > 0.0, start, 0.0)
    return {
        "A": A,
        "blocks": inverse.begin_inverse(A),
        "end": to_end * g.beta,
        "start": start,
        "last": from_start[:, -1:],
    }


def hand_on(refs: GdnRefs, k) -> None:
    """Store the keys for the next grid step; all stages may share a key head, so none reads it in this one."""
    refs.keys_prev[...] = refs.keys[...]
    refs.keys[...] = k


def apply_inverse(refs: GdnRefs, A_inv, valid, part: tile.Heads) -> None:
    """Compute and store what takes the state of some heads through the chunk inverted, and store their A_inv."""
    refs.A_inv_out[part.packs_at] = A_inv = A_inv[part.packs_at]  # [n, C, p C]
    refs.last_prev[part.packs_at] = refs.last[part.packs_at]
    dtype, A_inv = refs.k.dtype, refs.end[part.packs_at] * A_inv
    v = layout.load_heads(refs.v, part.V, part.values_at, valid)  # [heads, C, V]
    k = refs.keys[part.keys_at]
    k = jnp.stack([k[i // part.group] for i in range(part.heads)])  # [heads, C, K]
    by_start = A_inv * -refs.start[part.packs_at]
    refs.u[part.values_at] = packed.multiply_packed(
        packed.concat_lanes(packed.split_bf16(A_inv, dtype)), v, part.p, dtype
    )
    w = packed.multiply_packed(packed.concat_lanes(packed.split_bf16(by_start, dtype)), k, part.p, dtype)
    refs.w[part.values_at] = w.astype(dtype)


def pass_chunk(refs: GdnRefs, part: tile.Heads) -> Iterator[None]:
    """Take the state through prev, in two products that wait for one another."""
    first, S = part.map_lane, refs.state[part.values_at]  # [heads, K, channels]
    products = matmul.dot(refs.w[part.values_at], S.astype(refs.w.dtype))  # [heads, C, channels]
    yield
    valued = products[:, :, :first] + packed.whole(refs.u[part.values_at])
    products = packed.concat_lanes([valued, products[:, :, first:]])
    last = tile.head_columns(refs.last_prev[part.packs_at], part, S.shape[2])  # [heads, 1, channels]
    refs.state[part.values_at] = last * S + tile.write_state(refs.keys_prev[part.keys_at], products, part)


def plan(x: Operands, static: FusedStatic, outputs: tuple[str, ...]) -> dict[str, Any]:
    """Return the launch of the kernel, as `kernel.launch_of` does, for the outputs "ht", "M" and "A_inv"."""
    static = static.in_spans_of(2 if kernel.chunks_in_turn(x, static) == 2 else 1)
    s, scratch, chunks = loads.heads_of(static, static.config.heads), kernel.buffers(x, static, outputs), static.chunks
    row = chunks * s.heads // s.p, 1, s.p * s.C
    scratch |= {"start": row, "last": row, "last_prev": row, "keys_prev": scratch["keys"]}
    scratch |= {"u": (chunks * s.heads, s.C, s.V), "w": pltpu.VMEM((chunks * s.heads, s.C, s.K), x.k.dtype)}
    if x.owner is not None:
        owners = dict.fromkeys(("owner_second", "owner_prev"), pltpu.VMEM((1, 1, s.p * s.C), jnp.int32))
        scratch |= owners | dict.fromkeys(("nonfinite_rows", "nonfinite_prev"), (1, s.C, 1))
    return kernel.launch_of(x, static, outputs, _map_kernel, scratch, stages=3)
