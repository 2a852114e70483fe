"""The forward for few heads, as one of many devices has: a grid step takes several chunks, in one launch.

The chain from the state before a chunk to the state after it is what few heads wait for: in `kernel` it has three
products that wait for one another. Two of them need no state, so they are applied to one another ahead of it. With the
names of `kernel`,

    L = [P A_inv; K^T e^(G_last - G) B A_inv]     no state in it
    [o - scale e^G Q S; S' - e^G_last S] = L R    what new values add to the output, and to the state

So the chain has two products, and everything else is done for all chunks of a grid step at once, as if they were more
heads. Three stages share a grid step, each on chunks of its own, so that none waits for another: the first prepares
P and I + A, the second makes A_inv and L, the third takes the state through the chunks one by one. A launch for the
inverses alone, as `jax.checkpoint` runs it before a backward, has the first two stages, without P and L.

Every row of the batch is one sequence here, and its states do not lie in a pool.
"""

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental.pallas import tpu as pltpu

from chunkwise.fused_gdn import cost, kernel, loads, tile
from chunkwise.shared.kernels import chunk_loop, interleaved, inverse, layout, matmul, packed, schedule
from chunkwise.shared.kernels.operands import FusedStatic, Operands

# Heads of all chunks together that are prepared, inverted and finished at a time, and of a chunk that pass the state.
PREPARED, INVERTED, FINISHED, PASSED = 4, 16, 4, 8


class GdnChunksRefs(NamedTuple):
    """The Refs of the forward of several chunks a grid step, `rows` = chunks C tokens.

    A Ref that a launch lacks is None. heads are the value heads of a grid step, keys their key heads, and n the packs
    of the heads of all its chunks.
    """

    q: jax.Ref  # [rows, keys K] of the first stage
    k: jax.Ref  # [rows, keys K] of the first stage
    v: jax.Ref  # [rows, heads V] of the third stage
    g: jax.Ref  # [rows, heads] of the first stage
    beta: jax.Ref  # [rows, heads] of the first stage
    unread_q: jax.Ref  # an operand that is not read
    unread_v: jax.Ref  # an operand that is not read
    initial_state: jax.Ref  # [heads, K, V]
    A_inv: jax.Ref  # None: no earlier launch has made it
    o: jax.Ref  # [rows, heads V] of the third stage
    ht: jax.Ref  # [heads, K, V]
    A_inv_out: jax.Ref  # [chunks, packs of a chunk, C, p C] of the second stage
    state: jax.Ref  # float32 [heads, K, V]; the Ref ht, if the final states are requested
    # What the first stage leaves for the second.
    start: jax.Ref  # float32 [n, C, p C], decays from the start of a chunk
    end: jax.Ref  # float32 [n, C, p C], decays to its end, times beta
    keys: jax.Ref  # [chunks keys, C, K]
    queries: jax.Ref  # [chunks keys, C, K]
    scores: jax.Ref  # parts of P, [n, C, parts p C]
    A: jax.Ref  # float32 [n, C, p C]
    blocks: jax.Ref  # float32 [n, rows, p C], the part of A_inv that takes no products
    # What the second stage leaves for the third.
    start_prev: jax.Ref  # as start
    keys_prev: jax.Ref  # as keys
    queries_prev: jax.Ref  # as queries
    left: jax.Ref  # parts of L, [n, C + K, parts p C]


def takes(x: Operands, static: FusedStatic, outputs: tuple[str, ...]) -> bool:
    """Return whether the launch is for these operands and outputs."""
    plain = not static.varlen and x.owner is None and x.pool is None and x.A_inv is None
    known = {*outputs} == {"A_inv"} or ("o" in outputs and {*outputs} <= {"o", "ht", "A_inv"})
    return plain and known and step_chunks(static) > 1


def step_chunks(static: FusedStatic) -> int:
    """Return the chunks of a grid step: a quarter of a row at most, because the stages fill and empty once a row."""
    return min(static.config.chunks, static.steps // 4)


def _kernel(refs: GdnChunksRefs, *, static: FusedStatic, s: tile.Heads) -> None:
    """Run the stages of a grid step, each on chunks of its own."""
    if refs.ht is not None:
        # The block of the output stays in fast memory until the next row begins.
        refs = refs._replace(state=refs.ht)
    cur, *_, prev = chunk_loop.current_steps(None, 2 if refs.o is None else 3, static)
    rows = chunk_loop.Rows.SOME if static.readable % (static.chunks * s.C) else chunk_loop.Rows.ALL
    chunks_of = lambda step: [
        chunk_loop.stage_chunk(step.of_chunk(jnp.int32(i)), rows, s.C, None, i) for i in range(static.chunks)
    ]
    q, k, g, beta = _load_chunks(refs, chunks_of(cur), s, static)
    every, staged, inverses, lefts = s.over(static.chunks), [], {}, {}
    groups = every.split(INVERTED)
    inverting = _together([_invert(refs, group, k.dtype, inverses) for group in groups])
    stages: dict[str, Iterator] = dict(m=_prepare(refs, q, k, g, beta, every, static, staged), x=inverting)
    # Between two products of the inverse, or of the state, there is other work.
    n, order = len(every.split(PREPARED)), "xm"
    if refs.o is not None:
        order = "xpm" + "xpmp" * 2 + "pmp" * (n - 2) + "xp" * 2 + "fp" * n
        stages["f"] = _finish(refs, every, groups, inverting, inverses, lefts)
        stages["p"] = schedule.software_pipeline(
            _pass_chunks(refs, chunks_of(prev), part, s, static) for part in s.split(PASSED)
        )
    schedule.interleave(order, **stages)
    for remaining in stages.values():
        for _ in remaining:
            pass
    _hand_on(refs, q, k, every, staged, inverses, lefts, groups)


def _load_chunks(refs: GdnChunksRefs, chunks: list[chunk_loop.StageChunk], s: tile.Heads, static: FusedStatic):
    """Load the chunks of a grid step: q (or None) and k [chunks keys, C, K]; g and beta [C, chunks heads] float32."""
    at = lambda i: slice(i * s.C, (i + 1) * s.C)
    each = [loads.load_chunk(refs, chunk.valid, s, static, at(chunk.index))[:4] for chunk in chunks]
    q, k, g, beta = zip(*each, strict=True)
    return (
        None if refs.q is None else jnp.concatenate(q),
        jnp.concatenate(k),
        jnp.concatenate(g, axis=1),
        jnp.concatenate(beta, axis=1),
    )


def _prepare(
    refs: GdnChunksRefs, q, k, g, beta, every: tile.Heads, static: FusedStatic, staged: list
) -> Iterator[None]:
    """Add to `staged` what the second stage needs of the heads of all chunks, some heads at a time."""
    gates = tile.gate_sums(g, beta, every, k.dtype != jnp.bfloat16, None)
    yield
    for part in every.split(PREPARED):
        staged.append((part, kernel.prepare(refs, q, k, gates, part, None, static)))
        yield


def _invert(refs: GdnChunksRefs, group: tile.Heads, dtype, inverses: dict) -> Iterator[None]:
    """Leave A_inv of some heads in `inverses`, by the first of them."""
    count = 2 if dtype == jnp.bfloat16 else 3
    for A_inv in inverse.block_doubling(refs.blocks[group.packs_at], refs.A[group.packs_at], count):
        inverses[group.first] = A_inv
        yield


def _together(each: list[Iterator]) -> Iterator[None]:
    """Take all iterators one step further at a time."""
    done = object()
    while each:
        each = [x for x in each if next(x, done) is not done]
        yield


def _finish(
    refs: GdnChunksRefs, every: tile.Heads, groups: list[tile.Heads], inverting, inverses: dict, lefts: dict
) -> Iterator[None]:
    """Leave L in `lefts`, some heads at a time, once the inverse is whole."""
    for _ in inverting:
        pass
    for part in every.split(FINISHED):
        group = [x for x in groups if x.first <= part.first][-1]
        A_inv = inverses[group.first][part._replace(first=part.first - group.first).packs_at]
        at = part.packs_at
        lefts[part.first] = left_of_values(refs.scores[at], A_inv, refs.end[at] * A_inv, refs.keys[part.keys_at], part)
        yield


def left_of_values(scores, A_inv, A_end, k, part: tile.Heads) -> jax.Array:
    """Return L = [P A_inv; K^T A_end] of every head, packed, as parts [n, C + K, parts p C].

    Args:
      scores: parts of P side by side, [n, C, parts p C].
      A_inv: packed inverses [n, C, p C]; A_end: the same with each row times its step size and decay to the end.
      k: [key heads, C, K].
      part: the heads.
    """
    dtype, width = k.dtype, part.p * part.C
    spread = [inverse.spread(x, part.C) for x in packed.split_bf16(A_inv, dtype)]
    left, right = packed.part_pairs([scores[:, :, i : i + width] for i in range(0, scores.shape[2], width)], spread)
    outputs = matmul.dot(packed.concat_lanes(left), packed.concat_rows(right))  # [n, C, p C]
    keys, ends = tile.key_packs(k, part), packed.split_bf16(A_end, dtype)
    if len(keys) > 1:  # the columns of a head take the keys of this head alone
        owner = packed.block_of(packed.lane_index(width), width // len(keys))
        ends = [jnp.where(owner == i, x, jnp.zeros_like(x)) for x in ends for i in range(len(keys))]
    keys = packed.concat_rows(keys * (len(ends) // len(keys)))
    states = matmul.dot_tn(keys, packed.concat_rows(ends))  # [n, K, p C]
    return packed.concat_lanes(packed.split_bf16(packed.concat_rows([outputs, states]), dtype))


def _pass_chunks(
    refs: GdnChunksRefs, chunks: list[chunk_loop.StageChunk], part: tile.Heads, s: tile.Heads, static: FusedStatic
) -> Iterator[None]:
    """Write the outputs of some heads, and take their states through the chunks, one by one."""
    for chunk in chunks:
        rows, here = slice(chunk.index * s.C, (chunk.index + 1) * s.C), part.in_chunk(chunk.index, s)
        S = refs.state[part.values_at]  # [heads, K, V]
        if chunk.index == 0:  # no other chunk of a grid step is the first one of a row
            S = chunk_loop.or_initial(S, refs, chunk, part.values_at)
        start = tile.head_columns(refs.start_prev[here.packs_at], part, part.V)  # [heads, C, V]
        KS, QS = tile.read_state(refs.keys_prev[here.keys_at], refs.queries_prev[here.keys_at], S, part)
        assert QS is not None
        yield
        v = layout.load_heads(refs.v, part.V, part.values_at, chunk.valid, rows).astype(jnp.float32)
        added = packed.multiply_packed(refs.left[here.packs_at], v - start * KS, part.p, refs.k.dtype)
        refs.state[part.values_at] = start[:, -1:] * S + added[:, s.C :]
        layout.store_heads(refs.o, (static.scale * start) * QS + added[:, : s.C], None, part.first, rows)
        yield


def _hand_on(refs: GdnChunksRefs, q, k, every, staged: list, inverses: dict, lefts: dict, groups) -> None:
    """Store what the next grid step reads, last, because this one reads there what the one before stored."""
    if refs.A_inv_out is not None:
        for group in groups:
            n = refs.A_inv_out.shape[1]
            for i in range(group.packs_at.start, group.packs_at.stop):
                refs.A_inv_out[i // n, i % n] = inverses[group.first][i - group.packs_at.start]
    if refs.o is not None:
        for ref, of_next in (
            (refs.start_prev, refs.start), (refs.keys_prev, refs.keys), (refs.queries_prev, refs.queries)
        ):  # fmt: skip
            ref[...] = of_next[...]
        for part in every.split(FINISHED):
            refs.left[part.packs_at] = lefts[part.first]
        refs.keys[...], refs.queries[...] = k, q
    for part, values in staged:
        for ref, x in values:
            if ref is not None:
                ref[part.packs_at] = x


def plan(x: Operands, static: FusedStatic, outputs: tuple[str, ...]) -> dict[str, Any]:
    """Return the launch of the forward; the arguments and the result are as in `kernel.plan`, for what `takes` says."""
    B, HV, NT, s, dtype = static.B, static.HV, static.steps, loads.heads_of(static, static.config.heads), x.k.dtype
    chunks = step_chunks(static)
    static = dataclasses.replace(static, chunks=chunks, steps=-(-NT // chunks))
    with_output = "o" in outputs
    count = 3 if with_output else 2
    first, second, last = (chunk_loop.blocks(static, stage, count) for stage in (0, 1, count - 1))
    n, keys, parts = s.heads // s.p, s.heads // s.group, 2 if dtype == jnp.bfloat16 else 1
    key, value, gate = first.tokens(keys * s.K), last.tokens(s.heads * s.V), first.values(s.heads)
    state, lanes = last.state(s.heads, s.K, s.V), s.p * s.C
    matrix, of_keys = (chunks * n, s.C, lanes), pltpu.VMEM((chunks * keys, s.C, s.K), dtype)
    scratch: dict[str, Any] = {"A": matrix, "blocks": (chunks * n, inverse.first_block_rows(s.C), lanes)}
    if with_output:
        scratch |= dict.fromkeys(("start", "end", "start_prev"), matrix)
        scratch |= dict.fromkeys(("keys", "queries", "keys_prev", "queries_prev"), of_keys)
        scratch["scores"] = pltpu.VMEM((chunks * n, s.C, parts * lanes), dtype)
        scratch["left"] = pltpu.VMEM((chunks * n, s.C + s.K, parts * lanes), dtype)
    if with_output and "ht" not in outputs:
        scratch["state"] = s.heads, s.K, s.V
    estimate = cost.cost if with_output else cost.states_cost
    return dict(
        body=functools.partial(_kernel, static=static, s=s),
        refs=GdnChunksRefs,
        name=f"chunk_gated_delta_rule_{'fwd' if with_output else 'states'}_c{s.C}",
        # More grid steps, because the last stage has chunks two grid steps after they are prepared, or one.
        grid=(B, HV // s.heads, static.steps + count - 1),
        tables={},
        inputs={
            # Without q and v, a block of them stays an operand, so that vmap over one of them alone gives all results
            # the same batch axis.
            "q" if with_output else "unread_q": (x.q, key) if with_output else (interleaved.first(x.q), first.unread()),
            "k": (x.k, key),
            "v" if with_output else "unread_v": (x.v, value)
            if with_output
            else (interleaved.first(x.v), first.unread()),
            "g": (x.g, gate),
            "beta": (x.beta, gate),
            "initial_state": (x.initial_state, state),
            "A_inv": (None, None),
        },
        outputs={
            "o": (value, x.v.shape, dtype),
            "ht": (state, (static.N, HV, s.K, s.V), jnp.float32),
            "A_inv": (second.per_chunk(n, s.C, lanes), (B, NT, HV // s.p, s.C, lanes), jnp.float32),
        },
        requested=outputs,
        like={"o": x.q},
        scratch=scratch,
        cost_estimate=estimate(**static.sizes(), itemsize=dtype.itemsize),
        in_bounds=True,
    )
