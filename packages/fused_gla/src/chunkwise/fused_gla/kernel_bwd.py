"""The backward in one launch, in reverse by its index maps: two algorithms for a chunk, kernel body, launcher.

The forward left the state before every span. A grid step first recomputes in VMEM the states before its chunks, and
then goes through the chunks in reverse with the gradient of the state. States and gradients are float32, and [V, K]
like all states in the kernels.
"""

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from chunkwise.fused_gla import channels, config, kernel, loads, normaliser, packs, tile
from chunkwise.fused_gla.operands import GlaOperands, GlaRefs, GlaStatic
from chunkwise.shared.kernels import chunking, launcher, matmul, tiles
from chunkwise.shared.kernels.spans import chunk_loop, layout, schedule
from chunkwise.shared.kernels.spans.stage_chunks import StageChunk

# How many heads the backward takes in lock-step, and how many such pairs it starts before it finishes the first one.
PAIR, AHEAD = 2, 2
# The same where gates are per head and differ from token to token, and heads share key heads.
SHARED, SHARED_AHEAD = 4, 1


def _stored_decays(refs: GlaRefs, s: GlaStatic, heads: slice) -> tile.GlaDecays | None:
    """Return the decays of constant gates, which are stored with pairs transposed; None for other gates."""
    if not s.constant:
        return None
    each = (ref[heads] for ref in (refs.pairs_t, refs.from_start, refs.to_end, refs.through))
    return tile.GlaDecays(*each, s.scale)


def _recompute_state(refs: GlaRefs, s: GlaStatic, chunk: StageChunk) -> None:
    """Store the state after a chunk, which is the state before the next chunk."""
    before, after = refs.states.at[chunk.index], refs.states.at[chunk.index + 1]
    chunk = loads.isolate(refs, s, chunk, ("k", "v"), (before, chunk.carried))
    for heads in loads.runs_of(refs, s, config.RUN):
        _, k, v = loads.load_tensors(refs, s, chunk, heads)
        decays = loads.load_decays(refs, s, chunk, heads, _stored_decays(refs, s, heads))
        after[heads] = tile.next_state(before[heads], k, v, decays.to_end[:, :, : s.K], decays.through, s.parts)
    # The state before the chunk may have been cleared, but the gradients must see that it is not finite.
    loads.poison(s, chunk, (), (after, chunk.ending), (before, chunk.carried))


def _chunk_gradients(refs: GlaRefs, s: GlaStatic, chunk: StageChunk) -> None:
    """Store the gradients of a chunk; for sequences that are not finite, NaN, also in the gradient of the state."""
    states = (refs.states.at[chunk.index], chunk.carried), (refs.dstate, chunk.ending)
    chunk = loads.isolate(refs, s, chunk, ("q", "k", "v", "do"), *states)
    if s.per_channel:
        for heads in loads.runs_of(refs, s, config.RUN_BWD):
            _chunk_in_step(refs, s, chunk, heads)
    else:
        (_chunk_in_groups if s.constant else _chunk_in_packs)(refs, s, chunk)
    results = refs.dq, refs.dk, refs.dv, None if s.constant else refs.dg, refs.dlog_weight
    sums = () if refs.dskip is None else ((refs.dskip, True),)
    loads.poison(s, chunk, results, (refs.dstate, chunk.carried), *sums)


def _chunk_in_groups(refs: GlaRefs, s: GlaStatic, chunk: StageChunk) -> None:
    """Store the gradients of a chunk of constant gates.

    The matrix unit works in program order: while it computes the products of some heads, the vector unit finishes
    earlier heads. Sums over the value heads of a key head, and products that these share, go from one pair to the next.
    """
    every, group = refs.dstate.shape[0], loads.group_of(refs, s)
    # A pair holds whole groups, or is a part of a group.
    pair = PAIR if PAIR % group == 0 or group % PAIR == 0 else 1
    by_keys, sums = {}, {}

    def gradients(heads: slice) -> Iterator[None]:
        keys = loads.key_heads(refs, s, heads)
        begins, ends = heads.start % group == 0, heads.stop % group == 0
        q, k, v = loads.load_tensors(refs, s, chunk, heads)
        decays: Any = _stored_decays(refs, s, heads)
        do = loads.load(refs.do, s.V, s, chunk, heads).astype(k.dtype)  # [heads, C, V]
        states = lambda: (refs.states[chunk.index, heads], refs.dstate[heads])
        S, dS = states()  # [heads, V, K]
        by_keys[keys.start], products = tile.chunk_products(
            S, dS, q, k, v, do, s.parts, None if begins else by_keys[keys.start]
        )
        # These products wait for no other product, so the next pairs may begin before this pair ends.
        for _ in range(AHEAD):
            yield
        S, dS = states()
        sums[keys.start], dq, dk, dv, refs.dstate[heads], exponents = tile.chunk_bwd(
            by_keys[keys.start], products, S, dS, q, k, do, decays, s.parts, None if begins else sums[keys.start], ends
        )
        for ref, x, at in ((refs.dq, dq, keys), (refs.dk, dk, keys), (refs.dv, dv, heads)):
            if x is not None:
                loads.store(ref, x, s, chunk, at)
        if refs.dg is not None:
            refs.dg[heads] += tile.constant_gate_bwd(*exponents)

    schedule.run_each(gradients, every, pair)


def _recompute_in_packs(refs: GlaRefs, s: GlaStatic, chunk: StageChunk) -> None:
    """Store the state after a chunk, as `_recompute_state` does, where gates differ from token to token."""
    before, after = refs.states.at[chunk.index], refs.states.at[chunk.index + 1]
    chunk = loads.isolate(refs, s, chunk, ("k", "v"), (before, chunk.carried))
    kernel.pass_in_packs(refs._replace(state=before), s, chunk, after)
    # The state before the chunk may have been cleared, but the gradients must see that it is not finite.
    loads.poison(s, chunk, (), (after, chunk.ending), (before, chunk.carried))


def _chunk_in_packs(refs: GlaRefs, s: GlaStatic, chunk: StageChunk) -> None:
    """Store the gradients of a chunk whose gates are per head and differ from token to token.

    Its order is that of `_chunk_in_groups`.
    """
    p, every, group = s.p, refs.dstate.shape[0], loads.group_of(refs, s)
    most, ahead = (PAIR, AHEAD) if group == 1 else (SHARED, SHARED_AHEAD)
    gates, count = loads.load_sums(refs, s, chunk), loads.sum_parts(refs)
    scores, sums, terms = {}, {}, packs.GateTerms(s.C, every, packs.before_last(chunk.valid, chunk.ending, s.C))

    def gradients(heads: slice) -> Iterator[None]:
        keys, mine = loads.key_heads(refs, s, heads), gates.of(heads)
        q, k = (loads.load_keys(ref, refs, s, chunk, heads) for ref in (refs.q, refs.k))
        v, do = (loads.load_packs(ref, refs, s, chunk, heads) for ref in (refs.v, refs.do))
        (S, n), (dS, dn) = (normaliser.split(y, s) for y in (refs.states[chunk.index, heads], refs.dstate[heads]))
        if heads.start % group == 0:
            scores[keys.start] = packs.scores(k, q, s.scale, True, chunk.same)
        products = packs.chunk_products(q, k, v, do, S, dS, mine, p, s.parts, count)
        # These products wait for no other product, so those of the next heads may begin before these heads end.
        for _ in range(ahead):
            yield
        divided = None
        if n is not None:
            least = loads.load_row(refs.least, refs, s, chunk, heads, 1.0)
            divided = normaliser.Divided(n, dn, least, s.eps)
        x = packs.chunk_bwd(
            q, k, v, do, S, dS, scores[keys.start], mine, s.scale, p, s.parts, products, divided
        )  # fmt: skip
        normaliser.store(refs.dstate.at[heads], x.d_state, x.dn)
        dv = x.dv
        if refs.skip is not None:
            dv = dv + loads.load_skip(refs, s, heads) * do.astype(jnp.float32)
        if refs.dskip is not None:
            _add_skip(refs, heads.start // p, v, do)
        loads.store(refs.dv, dv, s, chunk, slice(heads.start // p, heads.stop // p))
        begins = heads.start % group == 0
        sums[keys.start] = x.sums if begins else [y + z for y, z in zip(sums[keys.start], x.sums, strict=True)]
        if heads.stop % group == 0:
            dq, dk = packs.through_scores(sums[keys.start], q, k, s.scale, chunk.same)
            loads.store(refs.dq, dq, s, chunk, keys)
            loads.store(refs.dk, dk, s, chunk, keys)
        if refs.dg is not None:
            terms.add_gates(heads.start, x, p)
        if refs.dlog_weight is not None:
            terms.add_weights(heads.start, v, x, p)

    schedule.run_each(gradients, every, packs.heads_at_once(most, every, group, p))
    if refs.dg is not None:
        loads.store_gates(refs, refs.dg, terms.of_gates(chunk.same, chunk.ending), s, chunk, slice(0, every))
    if refs.dlog_weight is not None:
        loads.store_gates(refs, refs.dlog_weight, terms.of_weights(), s, chunk, slice(0, every))


def _add_skip(refs: GlaRefs, first: int, v: jax.Array, do: jax.Array) -> None:
    """Add the products of values and gradients of outputs, packs from number `first` on, to the sums over tokens."""
    m, C, lanes = v.shape
    product = v.astype(jnp.float32) * do.astype(jnp.float32)
    # Whole registers are added up; XLA sums inside of them, once for all chunks.
    parts = jnp.sum(product.reshape(m, C // 8, 8, lanes), axis=1)
    for i in range(m):
        refs.dskip[:, (first + i) * lanes : (first + i + 1) * lanes] += parts[i]


def _chunk_in_step(refs: GlaRefs, s: GlaStatic, chunk: StageChunk, heads: slice) -> None:
    """Store the gradients of a chunk whose gates are per channel, of some heads in lock-step."""
    pairs = loads.pairs_of(refs, s)
    q, k, v = loads.load_tensors(refs, s, chunk, heads)
    decays = loads.load_decays(refs, s, chunk, heads, pairs=pairs)
    do = loads.load(refs.do, s.V, s, chunk, heads).astype(k.dtype)  # [heads, C, V]
    S, dS = refs.states[chunk.index, heads], refs.dstate[heads]
    dq_state, dk_state, dv_state, through, refs.dstate[heads] = channels.state_bwd(S, dS, q, k, v, do, decays)
    P, dP = channels.scores(q, k, decays, chunk.same), matmul.dot_nt(do, v)  # [heads, C, C]
    dq_scores, dk_scores, exponents = channels.scores_bwd(dP, q, k, decays, chunk.same)
    dq, dk, dv = dq_state + dq_scores, dk_state + dk_scores, dv_state + matmul.dot_tn(P.astype(do.dtype), do)
    from_start, to_end = (
        tiles.repeat_heads(y, len(v)).astype(jnp.float32) * dy for y, dy in ((q, dq_state), (k, dk_state))
    )
    # The decay of the state is a gate, too.
    dg = through + channels.gate_bwd(exponents, from_start, to_end, chunk.same)  # [heads, C, K]
    _store(refs, s, chunk, heads, dq, dk, dv, dg)
    if pairs is channels.Pairs.PRODUCT:
        # This stands behind everything else, because the compiler moves no operation across a branch.
        @pl.when(channels.any_left_over(decays))
        def _():
            levels, keys = loads.load_levels(refs, s, chunk, heads), channels.left_over(k, decays)
            P = channels.level_scores(q, keys, levels, s.scale, chunk.same)
            more_q, more_k, exponents = channels.level_scores_bwd(dP, q, keys, levels, s.scale, chunk.same)
            more_k = channels.left_over(more_k, decays)
            more_v, more_g = matmul.dot_tn(P.astype(do.dtype), do), channels.level_gate_bwd(exponents)
            _store(refs, s, chunk, heads, dq + more_q, dk + more_k, dv + more_v, dg + more_g)


def _store(refs: GlaRefs, s: GlaStatic, chunk: StageChunk, heads: slice, dq, dk, dv, dg) -> None:
    """Store gradients [heads, C, D] of a chunk; those of q and k are added up over the value heads of a key head."""
    keys = loads.key_heads(refs, s, heads)
    for ref, x in ((refs.dq, dq), (refs.dk, dk)):
        loads.store(ref, tile.to_key_heads(x, keys.stop - keys.start), s, chunk, keys)
    loads.store(refs.dv, dv, s, chunk, heads)
    if refs.dg is not None:
        loads.store_gates(refs, refs.dg, dg, s, chunk, heads)


def _gla_bwd_kernel(refs: GlaRefs, s: GlaStatic) -> None:
    """Take the gradient of the state back through the chunks of a span; the last span comes first."""
    if refs.dh0 is not None:
        # The block of the output stays in fast memory until another sequence begins.
        refs = refs._replace(dstate=refs.dh0)
    span = chunk_loop.current_span_backwards(refs.table, s)
    ends = chunk_loop.ends(span)
    chunk_loop.start_state(refs.dstate, refs.dht, ends)
    if refs.dskip is not None:
        pl.when(pl.program_id(2) == 0)(functools.partial(layout.clear, refs.dskip))
    if s.constant:

        @pl.when(ends)
        def _():
            decays: Any = loads.constant_decays(refs, s, refs.dstate.shape[0])
            refs.pairs_t[...] = jnp.broadcast_to(jnp.swapaxes(decays.pairs, 1, 2), refs.pairs_t.shape)
            refs.from_start[...] = jnp.broadcast_to(decays.from_start, refs.from_start.shape)
            refs.to_end[...] = jnp.broadcast_to(decays.to_end, refs.to_end.shape)
            refs.through[...] = jnp.broadcast_to(decays.through, refs.through.shape)
            layout.clear(refs.dg)

    if s.varlen:
        chunk_loop.clear_unowned(span, (refs.dq, refs.dk, refs.dv, refs.dg, refs.dlog_weight), backwards=True)
    first, end = chunk_loop.chunk_range(span, s)
    refs.states[first] = refs.h[...]
    recompute = functools.partial(_recompute_state if s.per_channel or s.constant else _recompute_in_packs, refs, s)
    chunk_loop.run_chunks(recompute, refs, span, s, first, end - 1)
    gradients = functools.partial(_chunk_gradients, refs, s)
    chunk_loop.run_chunks(gradients, refs, span, s, first, end, backwards=True)


def _gla_bwd_state_kernel(refs: GlaRefs, s: GlaStatic) -> None:
    """Take the gradient of the state back through the chunks of a span; the last span comes first.

    It is the forward's computation with queries in the place of keys and gradients of outputs in the place of values,
    but with decays from the start of the chunk.
    """
    span = chunk_loop.current_span_backwards(refs.table, s)
    chunk_loop.start_state(refs.ht, refs.initial_state, chunk_loop.ends(span))
    constant = loads.constant_decays(refs, s, refs.ht.shape[0])

    def pass_chunk(chunk: StageChunk) -> None:
        chunk = loads.isolate(refs, s, chunk, ("k", "v"), (refs.ht, chunk.ending))
        if not (s.per_channel or s.constant):
            kernel.pass_in_packs(refs._replace(state=refs.ht), s, chunk, backwards=True)
            loads.poison(s, chunk, (), (refs.ht, chunk.carried))
            return
        for heads in loads.runs_of(refs, s, config.RUN):
            _, k, v = loads.load_tensors(refs, s, chunk, heads)
            decays = loads.load_decays(refs, s, chunk, heads, constant and constant.of(heads))
            refs.ht[heads] = tile.next_state(refs.ht[heads], k, v, decays.from_start, decays.through, s.parts)
        loads.poison(s, chunk, (), (refs.ht, chunk.carried))

    chunk_loop.run_chunks(pass_chunk, refs, span, s, *chunk_loop.chunk_range(span, s), backwards=True)


def launch_state(x: GlaOperands, s: GlaStatic) -> jax.Array:
    """Return only the gradient of the initial states, [N, HV, V, K] float32, as `launch` does."""
    # Queries and the gradients of outputs act on the gradient of the state as keys and values act on the state.
    dtype = matmul.operand_dtype(x.q.dtype, x.k.dtype, x.v.dtype)
    q, heads, cut = x.q.astype(dtype), s.config.heads, chunk_loop.blocks_backwards(s)
    x = dataclasses.replace(x, k=q, v=x.do.astype(dtype), initial_state=x.dht)
    return launcher.launch(
        functools.partial(_gla_bwd_state_kernel, s=s),
        GlaRefs,
        inputs=kernel.inputs_of(x, s, cut, heads, queries=None),
        outputs={"ht": (cut.state(heads, *s.state), (s.N, s.HV, *s.state), jnp.float32)},
        **kernel.launched(x, s, "bwd_state", heads, output=False),
    )["ht"]


def launch(x: GlaOperands, s: GlaStatic, outputs: tuple[str, ...]) -> dict[str, jax.Array]:
    """Run the backward, or the part of it that makes the gradient of the initial states alone.

    Args:
      x: operands of the forward, do, dht, and h unless only dh0 is requested.
      s: static sizes.
      outputs: names of gradients.

    Returns:
      A dict of the outputs: dq, dk, dv in the layouts and types of q, k, v; dg float32 in the layout of the gates;
      dg_gamma [HV, 1, 1] float32, the gradient of constant gates; dh0 float32, the gradient of the initial states.
    """
    if outputs == ("dh0",):
        return {"dh0": launch_state(x, s)}
    heads, cut = s.config.heads_bwd, chunk_loop.blocks_backwards(s)
    (keys, share), state, value = s.key_blocks(heads), (heads, *s.state), cut.tokens(heads * s.V)
    inputs = kernel.inputs_of(x, s, cut, heads, queries="q")
    gate, gates = inputs["g"][1], (s.B, chunking.num_chunks(s.T, s.C), s.HV, 1, s.C)
    if s.per_channel:
        gates = s.B, s.T, s.HV * s.K
    # At least two states, because in an interpreted kernel XLA would drop the index of a single state, and then round
    # differently.
    scratch: dict[str, Any] = {"states": (max(s.chunks, 2), *state)}
    if "dh0" not in outputs:
        scratch["dstate"] = state
    if s.constant:
        gate, gates = cut.per_row(heads, 8, max(s.C, s.K)), (s.B, s.HV, 8, max(s.C, s.K))
        # These are whole tiles, because a column would be broadcast at every use.
        scratch |= {"pairs_t": (heads, s.C, s.C), "from_start": (heads, s.C, s.K)}
        scratch |= {"to_end": (heads, s.C, max(s.K, s.V)), "through": (heads, 1, s.K)}

    def key_sums(y: jax.Array) -> tuple:
        """Return the block, shape and type of the gradient of queries or keys: sums where blocks share a key head."""
        shape = *y.shape[:2], y.shape[2] * share
        return cut.tokens(keys * s.K), shape, y.dtype if share == 1 else jnp.float32

    of_gates = {"dg"} if "dg" in outputs or "dg_gamma" in outputs else set()
    results = launcher.launch(
        functools.partial(_gla_bwd_kernel, s=s),
        GlaRefs,
        inputs=inputs
        | {
            "do": (x.do, value),
            "dht": (x.dht, cut.state(*state)),
            "h": (x.h, cut.per_span(*state)),
        },
        outputs={
            "dq": key_sums(x.q),
            "dk": key_sums(x.k),
            "dv": (value, x.v.shape, x.v.dtype),
            "dg": (gate, gates, jnp.float32),
            "dlog_weight": (gate, gates, jnp.float32),
            "dskip": (cut.per_row(None, 8, heads * s.V), (s.B, s.HV // heads, 8, heads * s.V), jnp.float32),
            "dh0": (cut.state(*state), (s.N, s.HV, *s.state), jnp.float32),
        },
        requested={"dq", "dk", "dv", *of_gates, *outputs},
        scratch=scratch,
        **kernel.launched(x, s, "bwd", heads, backward=True),
    )
    for name, y in (("dq", x.q), ("dk", x.k)):
        results[name] = _added_up(s, results[name], y, share)
    if "dg_gamma" in outputs:
        results["dg_gamma"] = _sum_gates(s, results["dg"])
    if "dskip" in outputs:
        results["dskip"] = jnp.sum(results["dskip"], axis=(0, 2)).reshape(1, -1)
    if "dleast" in outputs:
        results["dleast"] = jnp.zeros_like(x.least)
    return {name: y for name, y in results.items() if name in outputs}


def _sum_gates(s: GlaStatic, dg: jax.Array) -> jax.Array:
    """Return the gradient of the constant gates [HV, 1, 1] from the gradient of all gates.

    Args:
      s: static sizes.
      dg: [B, NT, HV, 1, C], or if all gates are constant [B, HV, 8, max(C, K)], parts of the sum over tokens.
    """
    if s.constant:
        return jnp.sum(dg, axis=(0, 2, 3))[:, None, None]
    # By token, without rows past the last token, which get a part of the gradient of the last chunk's decay.
    tokens = jnp.moveaxis(dg[:, :, :, 0], 3, 2).reshape(s.B, -1, s.HV)[:, : s.T]
    return jnp.sum(tokens, axis=(0, 1))[:, None, None]


def _added_up(s: GlaStatic, y, like: jax.Array, share: int) -> jax.Array:
    """Return the gradient of queries or keys from the sums [B, T, H * share * K] of blocks that share a key head."""
    if share == 1:
        return y
    return jnp.sum(y.reshape(s.B, s.T, s.H, share, s.K), axis=3).reshape(like.shape).astype(like.dtype)
