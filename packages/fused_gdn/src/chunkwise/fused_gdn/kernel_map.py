"""The map that tokens apply to a state, in one launch without queries and outputs: kernel body and launcher.

With the names of kernel.py, A_inv applied to values and keys needs no state:

    u = e^(G_last - G) B A_inv V        w = -e^(G_last - G) B A_inv e^G K        S' = e^G_last S + K^T (u + w S)

So a chunk takes three grid steps: one prepares it, the next makes its A_inv, u and w, and the last takes the state
through it, with two products that wait for one another instead of three. Where the tensors are bfloat16, V and K are
exact operands, so that the products with A_inv need fewer parts. A_inv and u + w S keep 16 bits, because sums over them
cancel; w is rounded in its product as the state is there.

A state may have K more channels, which have no values: from the identity they become M, the matrix that takes a state
through all tokens.
"""

import functools
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from chunkwise.fused_gdn import config, kernel, loads, tile
from chunkwise.shared import tuning
from chunkwise.shared.kernels import inverse, matmul, packed, tiles
from chunkwise.shared.kernels.spans import chunk_loop, chunk_spans, layout, schedule, stage_chunks
from chunkwise.shared.kernels.spans.operands import FusedStatic, Operands


class GdnMapRefs(NamedTuple):
    """The Refs of the map, for three chunks: cur, which is prepared; inverted; and prev, through which the state goes.

    A Ref that a launch lacks is None. heads are the value heads of a grid step, n their packs and keys their key heads.
    """

    table: jax.Ref  # `chunk_spans.Spans`
    k: jax.Ref  # [C, keys K] of cur
    v: jax.Ref  # [C, heads V] of inverted
    g: jax.Ref  # [C, heads] of cur
    beta: jax.Ref  # [C, heads] of cur
    initial_state: jax.Ref  # [heads, K, V]
    owner: jax.Ref  # int32 [1, 1, p C] of cur
    ht: jax.Ref  # [heads, K, V]
    A_inv: jax.Ref  # [n, C, p C] of inverted
    M: jax.Ref  # [heads, K, K]
    state: jax.Ref  # float32 [heads, K, V], or with M [heads, K, V + K]
    A: jax.Ref  # float32 [n, C, p C]; below the diagonal, A_inv is the inverse of I + A
    blocks: jax.Ref  # float32 [n, rows, p C], the part of A_inv that takes no products
    end: jax.Ref  # float32 [n, C, p C], decays to the end of inverted, times beta
    start: jax.Ref  # float32 [n, 1, p C], decays from the start of inverted
    last: jax.Ref  # float32 [n, 1, p C], the decay over inverted
    last_prev: jax.Ref  # float32 [n, 1, p C]
    k_inverted: jax.Ref  # [keys, C, K]
    k_prev: jax.Ref  # [keys, C, K]
    u: jax.Ref  # float32 [heads, C, V] of prev
    w: jax.Ref  # [heads, C, K] of prev
    nonfinite_k: jax.Ref  # float32 [1, C, 1], rows of inverted that are not finite, without a look at v
    nonfinite_v: jax.Ref  # float32 [1, C, 1], rows of prev that are not finite
    owner_inverted: jax.Ref  # int32 [1, 1, p C]
    owner_prev: jax.Ref  # int32 [1, 1, p C]
    q: jax.Ref


def _map_kernel(refs: GdnMapRefs, *, static: FusedStatic, s: tile.Heads) -> None:
    """Take the state through the chunk prev, multiply the chunk inverted by its A_inv, and prepare the chunk cur."""
    spans = *_, prev = chunk_loop.current_spans(refs.table, 3, static)

    # In the first grid steps scratch memory holds anything; the first span of a sequence resets the state.
    @pl.when(prev.first == 1)
    def _():
        shape = s.heads, s.K, s.V
        start = chunk_loop.empty_state(shape) if refs.initial_state is None else refs.initial_state[...]
        refs.state[:, :, : s.V] = start
        if refs.M is not None:
            i, j = (lax.broadcasted_iota(jnp.int32, (s.heads, s.K, s.K), axis) for axis in (1, 2))
            refs.state[:, :, s.V :] = tile.indicator(i == j)

    chunk_loop.run_variant(functools.partial(_grid_step, refs, spans, static=static, s=s), refs, spans, static)

    @pl.when(prev.last == 1)
    def _():
        refs.ht[...] = refs.state[:, :, : s.V]
        if refs.M is not None:
            refs.M[...] = refs.state[:, :, s.V :]


def _grid_step(
    refs: GdnMapRefs, spans: list[chunk_spans.Span], rows: stage_chunks.Rows, static: FusedStatic, s: tile.Heads
) -> None:
    """Run all stages of a grid step, in the variant for these rows of the three chunks."""
    owners = refs.owner, refs.owner_inverted, refs.owner_prev
    cur, inverted, prev = (stage_chunks.stage_chunk(span, rows, s.C, x) for span, x in zip(spans, owners, strict=True))
    cur = cur.isolate(functools.partial(loads.tokens_not_finite, refs, s, refs.k), stages=3)
    inverted = inverted.isolate(lambda: jnp.maximum(refs.nonfinite_k[...], loads.values_not_finite(refs, s)), stages=3)
    prev = prev.isolate(lambda: refs.nonfinite_v[...], (refs.state, prev.carried), stages=3)
    _, k, g, beta, _ = loads.load_chunk(refs, cur.valid, s, static)
    exact = k.dtype != jnp.bfloat16
    gates = tile.gate_sums(g, beta, s, exact, cur.masks)

    stages, staged, inverses = s.split(kernel.STAGE), [], []
    inverting = (
        inverses.append(A_inv) for A_inv in inverse.block_doubling(refs.blocks[...], refs.A[...], 3 if exact else 2)
    )
    passing = schedule.software_pipeline(pass_chunk(refs, stage) for stage in stages)
    halves = [part for stage in stages for part in stage.split(kernel.STAGE // 2)]
    preparing = (staged.append((part, prepare(refs, k, gates, part, cur.masks))) for part in halves)

    def apply_inverses() -> Iterator[None]:
        for _ in inverting:
            pass
        for stage in stages:
            apply_inverse(refs, inverses[-1], inverted.valid, stage)
            yield

    # The matrix unit takes products in the order of the program, and where one waits, all wait. Every product of the
    # inverse waits for the one before. Between two of them, some heads are prepared and others take the state on. Stage
    # n reads u and w of prev until the letter "p" of number n + 2 of the order; "a" of number n + 1 overwrites them, so
    # it must come later.
    applying = apply_inverses()
    order = tuning.find_order("chunkwise.fused_gdn", "map", (s.heads, s.C, s.K), "xpm" * len(halves))
    schedule.interleave(order, x=inverting, p=passing, m=preparing, a=applying)
    for remaining in (passing, applying, preparing):
        for _ in remaining:
            pass
    refs.A_inv[...] = inverses[-1]

    prev.poison((), (refs.state, prev.ending))
    if rows is stage_chunks.Rows.MIXED:
        refs.nonfinite_k[...], refs.nonfinite_v[...] = cur.nonfinite_rows, inverted.nonfinite_rows
    # The next grid steps read these from scratch memory. They are stored last, because this grid step reads there the
    # arrays of earlier chunks.
    if refs.owner is not None:
        refs.owner_prev[...], refs.owner_inverted[...] = refs.owner_inverted[...], refs.owner[...]
    refs.k_prev[...], refs.last_prev[...] = refs.k_inverted[...], refs.last[...]
    refs.k_inverted[...] = k
    for part, values in staged:
        for ref, x in values:
            ref[part.packs_at] = x


def prepare(refs: GdnMapRefs, k, gates: tile.Gates, part: tile.Heads, masks) -> list[tuple]:
    """Return the arrays of some heads of cur that the next grid step needs, each with its Ref in scratch memory."""
    g = tile.pack_gates(gates, part)
    pairs, from_start, to_end = tile.boundary_decays(g, part, masks)
    KK, D = tile.scores([k[part.keys_at]], k[part.keys_at], g, pairs, part)  # [n, C, p C]
    A = KK * (D * g.beta_rows)
    start = jnp.exp2(sum(g.G_rows))  # [n, 1, p C]
    if masks is not None:
        start = jnp.where(packed.concat_lanes([tiles.to_row(tile.indicator(masks.carried))] * part.p) > 0.0, start, 0.0)
    return [
        (refs.A, A),
        (refs.blocks, inverse.begin_inverse(A)),
        (refs.end, to_end * g.beta),
        (refs.start, start),
        (refs.last, from_start[:, -1:]),
    ]


def apply_inverse(refs: GdnMapRefs, A_inv, valid, part: tile.Heads) -> None:
    """Compute and store u and w of some heads."""
    dtype, A_inv = refs.k.dtype, refs.end[part.packs_at] * A_inv[part.packs_at]  # [n, C, p C]
    v = layout.load_heads(refs.v, part.V, part.values_at, valid)  # [heads, C, V]
    k = refs.k_inverted[part.keys_at]
    k = jnp.stack([k[i // part.group] for i in range(part.heads)])  # [heads, C, K]
    by_start = A_inv * -refs.start[part.packs_at]
    refs.u[part.values_at] = packed.multiply_packed(
        packed.concat_lanes(packed.split_bf16(A_inv, dtype)), v, part.p, dtype
    )
    w = packed.multiply_packed(packed.concat_lanes(packed.split_bf16(by_start, dtype)), k, part.p, dtype)
    refs.w[part.values_at] = w.astype(dtype)


def pass_chunk(refs: GdnMapRefs, part: tile.Heads) -> Iterator[None]:
    """Take the state through prev, in two products that wait for one another."""
    V, S = part.V, refs.state[part.values_at]  # [heads, K, channels]
    products = matmul.dot(refs.w[part.values_at], S.astype(refs.w.dtype))  # [heads, C, channels]
    yield
    valued = products[:, :, :V] + refs.u[part.values_at]
    products = valued if products.shape[2] == V else packed.concat_lanes([valued, products[:, :, V:]])
    last = tile.head_columns(refs.last_prev[part.packs_at], part, S.shape[2])  # [heads, 1, channels]
    refs.state[part.values_at] = last * S + tile.write_state(refs.k_prev[part.keys_at], products, part)


def plan(x: Operands, static: FusedStatic, outputs: tuple[str, ...]) -> dict[str, Any]:
    """Return the launch of the kernel.

    Args:
      x: operands; q is not read.
      static: the static description.
      outputs: "ht" and "A_inv", with or without "M".

    Returns:
      The arguments of `launcher.launch`, which gives a dict of these outputs: ht, the final states [N, HV, K, V], and M
      [N, HV, K, K], both float32 and undefined for empty sequences; and A_inv as in `Operands`.
    """
    B, HV, spans, s, dtype = static.B, static.HV, static.spans, loads.heads_of(static, static.config.heads), x.k.dtype
    cur, inverted, prev = (chunk_loop.blocks(static, stage, 3) for stage in range(3))
    n, keys, width = s.heads // s.p, s.heads // s.group, s.p * s.C
    channels, matrix, row = s.V + s.K * ("M" in outputs), (n, s.C, width), (n, 1, width)
    operand_k = pltpu.VMEM((keys, s.C, s.K), dtype)
    # The state, and the arrays that a grid step leaves for the next ones.
    scratch: dict[str, Any] = {
        "state": (s.heads, s.K, channels),
        "A": matrix,
        "blocks": (n, inverse.first_block_rows(s.C), width),
        "end": matrix,
        "start": row,
        "last": row,
        "last_prev": row,
        "k_inverted": operand_k,
        "k_prev": operand_k,
        "u": (s.heads, s.C, s.V),
        "w": pltpu.VMEM((s.heads, s.C, s.K), dtype),
    }
    if x.owner is not None:
        owners = pltpu.VMEM((1, 1, width), jnp.int32)
        scratch |= {"nonfinite_k": (1, s.C, 1), "nonfinite_v": (1, s.C, 1)}
        scratch |= {"owner_inverted": owners, "owner_prev": owners}
    state = prev.state(s.heads, s.K, s.V)
    return dict(
        body=functools.partial(_map_kernel, static=static, s=s),
        refs=GdnMapRefs,
        name=f"chunk_gated_delta_rule_summary_c{s.C}",
        # Two more grid steps, because the state goes through a chunk two grid steps after the chunk is prepared.
        grid=(B, HV // s.heads, spans + 2),
        tables={"table": x.table},
        inputs={
            "k": (x.k, cur.tokens(keys * s.K)),
            "v": (x.v, inverted.tokens(s.heads * s.V)),
            "g": (x.g, cur.values(s.heads)),
            "beta": (x.beta, cur.values(s.heads)),
            "initial_state": (x.initial_state, state),
            "owner": (x.owner, cur.owner(width)),
        },
        outputs={
            "ht": (state, (static.N, HV, s.K, s.V), jnp.float32),
            "A_inv": (inverted.per_span(*matrix), (B, spans, HV // s.p, s.C, width), jnp.float32),
            "M": (prev.state(s.heads, s.K, s.K), (static.N, HV, s.K, s.K), jnp.float32),
        },
        requested=outputs,
        scratch=scratch,
        cost_estimate=config.states_cost(**static.sizes() | {"V": channels}, itemsize=dtype.itemsize),
    )
