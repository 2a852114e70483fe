"""The backward of Kimi delta attention in one launch, spans in reverse: loads and stores, kernel body, launcher.

The mathematics is in tile_bwd.py. Where gates are too strong for base blocks, a second path behind everything else in a
grid step adds what is missing.
"""

import functools
from collections.abc import Callable, Generator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from chunkwise.kda import config, loads, tile, tile_bwd
from chunkwise.kda.operands import KdaOperands, KdaRefs, KdaStatic
from chunkwise.shared.kernels import packed, tiles, windows
from chunkwise.shared.kernels.spans import chunk_loop, chunk_spans, layout, nonfinite, schedule, stage_chunks

# Of several chunks in a grid step, a group has so many heads; one chunk may have more.
GROUP = 8


def _bwd_kernel(refs: KdaRefs, *, static: KdaStatic) -> None:
    """Take the gradient of the state back through a chunk; the last chunk comes first."""
    clear_sums(refs)
    results, in_lanes = results_of(refs, static)
    chunk_loop.run_backward(
        refs,
        functools.partial(_grid_step, static=static),
        static,
        not_finite=functools.partial(not_finite, refs, static),
        results=results,
        in_lanes=in_lanes,
        sums=(refs.dlaw,),
    )


def results_of(refs: KdaRefs, static: KdaStatic) -> tuple[tuple, tuple]:
    """Return the Refs of gradients of tokens, whose tokens lie in the rows, and in the lanes."""
    results, in_lanes = (refs.dq, refs.dk, refs.dv, refs.de, refs.db, refs.dw), (refs.dbeta,)
    return ((*results, refs.dg), in_lanes) if static.per_channel else (results, (refs.dg, *in_lanes))


def clear_sums(refs: KdaRefs) -> None:
    """Clear the sums over the tokens of a row of the batch where the row begins."""
    if refs.dlaw is not None:
        pl.when(pl.program_id(2) == 0)(functools.partial(layout.clear, refs.dlaw))


def _grid_step(refs: KdaRefs, chunk: stage_chunks.StageChunk, static: KdaStatic) -> None:
    """Run a grid step."""
    x, dtype = loads.load_chunk(refs, chunk.valid, chunk.masks, static), refs.do.dtype
    A_inv, scores, dS, keys, values = refs.A_inv[...], refs.scores[...], refs.dstate[...], static.keys, static.values
    of_outputs = tile_bwd.through_outputs(scores, x.do, dtype, values)
    of_values = schedule.finish(
        tile_bwd.back_to_values(x.k, x.beta, x.boundary, A_inv, of_outputs, dS, dtype, keys, values)
    )
    refs.dstate[...] = tile_bwd.back_to_state(x.q, x.e, x.boundary, x.do, of_values[-1], dS, dtype, keys)
    if refs.dq is not None:
        v_new_over_beta = values.load(refs.v_new_over_beta, valid=chunk.valid)  # [t, C, VL]
        residuals = refs.h[...], v_new_over_beta, scores
        found = schedule.finish(token_gradients(refs, x, residuals, of_values, dS, chunk.same, static))
        store(refs, found[0], x.k, chunk, static)
        store_beyond_base(refs, x, *found, [(refs, chunk)], static)


class Gradients(NamedTuple):
    """The gradients of the tokens of a chunk, as `store` takes them.

    Attributes:
      dq: of scaled queries, [t, C, KL].
      de: of erase keys, [t, C, KL]; None where keys erase.
      dk: [t, C, KL].
      dv: of values times write gates, [t, C, VL].
      dg: of decays, [C, t KL].
      dbeta: of step sizes, [heads, C].
    """

    dq: jax.Array
    de: Any
    dk: jax.Array
    dv: jax.Array
    dg: jax.Array
    dbeta: jax.Array

    def of_heads(self, heads: slice, static: KdaStatic) -> "Gradients":
        """Return the gradients of some heads."""
        at, KL = static.tiles(heads), static.keys.size
        each: dict[str, Any] = {
            name: None if x is None else x[heads if name == "dbeta" else at]
            for name, x in self._asdict().items()
            if name != "dg"
        }
        return Gradients(dg=self.dg[:, at.start * KL : at.stop * KL], **each)


def token_gradients(
    refs: KdaRefs, x: loads.Loaded, residuals, of_values, dS, same, static: KdaStatic
) -> Generator[None, None, tuple[Gradients, jax.Array]]:
    """Return the gradients of tokens, and d_scores; a generator that yields where other products may stand.

    The gradients lack the pairs of rows that base blocks cannot have.

    Args:
      refs: the Refs of the kernel, of which `decays` and `levels` are read.
      x: the tokens, of one chunk or of several.
      residuals: the state before the chunk, v_new_over_beta and scores, as in `tile_bwd.outer_bwd_tile`.
      of_values: the results of `tile_bwd.back_to_values`.
      dS: [t, V, m K] float32, the gradient of the state after the chunk.
      same: pairs of one sequence, as in `StageChunk`.
      static: the static description of the launch.
    """
    heads, dtype, early = x.betas.shape[0], refs.do.dtype, static.erase_before_decay
    C, p = static.C, static.p
    beta_rows = packed.side_lanes(x.betas[:, None], p)
    (dbeta, dbeta_row), d_scores, of_state = tile_bwd.outer_bwd_tile(
        x.k, x.beta, beta_rows, x.boundary, residuals, x.do, of_values, dS, same, dtype, early, static.keys,
        static.values,
    )  # fmt: skip
    by_head = [dbeta_row[n // p, :, n % p * C : (n % p + 1) * C] for n in range(heads)]  # each [1, C]
    dbeta = tiles.to_row(dbeta)[:, 0] + jnp.concatenate(by_head)  # [heads, C]
    dbeta = dbeta if x.rounding is None else dbeta * x.rounding
    yield
    # The products of the levels are made pack by pack.
    by_pack = []
    for n in range(0, heads, p):
        pack = static.tiles(slice(n, n + p))
        factors = tile.level_factors(loads.load_decays(refs.decays, range(pack.start, pack.stop), static, static.base))
        tensors = x.q[pack], x.e[pack], x.k[pack], d_scores[n // p : n // p + 1]
        by_pack.append(_of_pack(*tensors, factors, refs.levels[...], dtype, static))
        yield
    *by_pack, of_pairs = zip(*by_pack, strict=True)
    # [t, 2 C, KL], [t, C, KL] and [t, C, KL] or None
    d_rows, d_columns, terms = (None if y[0] is None else jnp.concatenate(y) for y in by_pack)
    dq, de, dk, later, earlier = tile_bwd.chunk_bwd_tile(x.q, x.erase, x.k, d_rows, d_columns, of_state, terms)
    dg = tile_bwd.gate_gradients(later, earlier, same, dtype)  # [C, t KL]
    dg = dg if of_pairs[0] is None else dg + jnp.concatenate(of_pairs, axis=1)
    return Gradients(dq, None if x.erase is None else de, dk, of_values[-1], dg, dbeta), d_scores


def _of_pack(q, e, k, d_scores, factors, levels, dtype, static: KdaStatic):
    """Return the result of `tile_bwd.interaction_bwd_tile` for a pack of heads, d_scores [1, 2 C, p C] among them."""
    by_level, early = tile_bwd.sums_by_level(static.base, dtype), static.erase_before_decay
    p = static.p // static.m
    return tile_bwd.interaction_bwd_tile(q, e, k, factors, levels, d_scores, p, dtype, by_level, early, static.keys)


def store_beyond_base(
    refs: KdaRefs, x: loads.Loaded, first: Gradients, d_scores, chunks: list, static: KdaStatic
) -> None:
    """Add the pairs of rows that base blocks cannot have, if there are any, to the gradients that `store` has stored.

    Such rows are rare, and products for every level are too expensive to be made in every grid step. This stands behind
    everything else in a grid step, because the compiler moves no operation across a branch.

    Args:
      refs, static: as in `token_gradients`.
      x, first, d_scores: the tokens and the results of `token_gradients`.
      chunks: for every chunk of x, its Refs and its `StageChunk`.
    """
    if refs.exact_levels is None:
        return
    heads = static.config.heads_bwd

    @pl.when(jnp.min(functools.reduce(jnp.minimum, list(x.least))) < jnp.float32(tile.LEAST_FACTOR))
    def _():
        found = gradients_beyond_base(refs, x, first, d_scores, chunks[0][1].same, static)
        for i, (view, chunk) in enumerate(chunks):
            at = slice(i * heads, (i + 1) * heads)
            both = found.of_heads(at, static), first.of_heads(at, static)
            store_interaction(view, both[0], x.k[static.tiles(at)], chunk, static, before=both[1])


def gradients_beyond_base(
    refs: KdaRefs, x: loads.Loaded, first: Gradients, d_scores, same, static: KdaStatic
) -> Gradients:
    """Return gradients with the pairs of rows that base blocks cannot have, by a product for every level.

    The arguments are as in `store_beyond_base`. Of other rows nothing is added to their queries. A loop takes the packs
    one after the other, so that this rare path is compiled once, and they read their tensors from scratch memory.
    """
    t, C, p, early, dtype = len(x.k), static.C, static.p // static.m, static.erase_before_decay, refs.do.dtype

    def of_pack(i, _) -> None:
        pack = [i * jnp.int32(p) + jnp.int32(n) for n in range(p)]

        @pl.when(loads.beyond_base(refs.decays, pack, static))
        def _():
            g, at = loads.kept_gates(refs.decays, pack, static), pl.ds(pack[0], p)
            loads.store_block_decays(refs.exact_decays, g, 1, in_nats=False, erase_before_decay=early)
            exact = loads.load_decays(refs.exact_decays, range(p), static, 1)
            factors = tile_bwd.factors_beyond_base(exact, loads.load_decays(refs.decays, pack, static, static.base))
            q, e, k = jnp.split(refs.tensors[at], 3, axis=1)
            found = _of_pack(q, e, k, refs.d_scores[i][None], factors, refs.exact_levels[...], dtype, static)
            refs.beyond[at] = packed.concat_rows(found[:3])

    refs.tensors[:t], refs.d_scores[: t // p] = packed.concat_rows([x.q, x.e, x.k]), d_scores
    refs.beyond[...] = jnp.zeros(refs.beyond.shape, jnp.float32)
    lax.fori_loop(jnp.int32(0), jnp.int32(t // p), of_pack, None)
    dq, de, dk, terms = (refs.beyond[:t, i * C : (i + 1) * C] for i in range(4))
    dg = first.dg + tile_bwd.gate_gradients(terms, None, same, dtype)
    if first.de is None:
        return first._replace(dq=first.dq + dq, dk=first.dk + (dk + de), dg=dg)
    return first._replace(dq=first.dq + dq, de=first.de + de, dk=first.dk + dk, dg=dg)


def store(refs: KdaRefs, x: Gradients, k: jax.Array, chunk: stage_chunks.StageChunk, static: KdaStatic) -> None:
    """Store the gradients of the tokens of a chunk, whose keys are k [t, C, KL] float32."""
    valid, dv = chunk.valid, x.dv
    stored = valid if static.varlen else None
    if refs.w is not None:
        v, w = (static.values.load(ref, valid=valid).astype(jnp.float32) for ref in (refs.v, refs.w))
        static.values.store(refs.dw, v * dv, stored)
        dv = w * dv
    static.values.store(refs.dv, dv, stored)
    if refs.dbeta is not None:
        _store_in_lanes(refs.dbeta, x.dbeta, chunk.span, stored, static.C)
    store_interaction(refs, x, k, chunk, static)


def store_interaction(
    refs: KdaRefs, x: Gradients, k, chunk: stage_chunks.StageChunk, static: KdaStatic,
    before: Gradients | None = None,
) -> None:  # fmt: skip
    """Store the gradients of queries, keys and gates of a chunk, as `store` does.

    Gradients `before` are stored already. Then queries get other gradients only in rows that base blocks cannot have:
    no bit of other rows may depend on later gates.
    """
    heads, C, keys, valid = static.config.heads_bwd, static.C, static.keys, chunk.valid
    # Pieces share a chunk, so each stores only its rows. Otherwise all rows are stored, because nobody reads rows past
    # the last token.
    stored = valid if static.varlen else None
    dk, dg = x.dk, x.dg
    if refs.law is not None:
        dg = through_law(refs, valid, dg, static, None if before is None else before.dg)
    elif chunk.masks is not None:  # padding's gates get gradients only from the passing state
        dg = jnp.where(valid, dg, 0.0)
    by_tile = (dg[:, n : n + keys.size] for n in range(0, dg.shape[1], keys.size))  # each [C, KL]
    if static.per_channel and keys.used < keys.size:
        keys.store(refs.dg, jnp.stack([*by_tile]), stored)
    elif static.per_channel:
        layout.store_rows(refs.dg, slice(None), dg, stored)
    elif refs.dg is not None:
        by_head = [jnp.sum(y, axis=1, keepdims=True) for x in by_tile for y in keys.parts(x)]  # each [C, 1]
        _store_in_lanes(refs.dg, tiles.to_row(jnp.stack(by_head))[:, 0], chunk.span, stored, C)
    if refs.b is not None:
        # Erase keys are keys times erase gates, so keys get a part of this gradient, too.
        keys.store(refs.db, k * x.de, stored)
        dk = dk + loads.load_erase_gates(refs, valid, static) * x.de
    rows = stored
    if before is not None:
        beyond = loads.rows_beyond_base(refs.decays, range(heads // static.m), static)[0]  # [C, heads C]
        beyond = jnp.max(beyond, axis=1, keepdims=True) > 0.0  # [C, 1], rows of some head
        rows = beyond if stored is None else stored & beyond
    gradients = [(refs.dq, refs.q, static.scale * x.dq, rows), (refs.dk, refs.k, dk, stored)]
    for ref, source, d, at in gradients + ([] if refs.e is None else [(refs.de, refs.e, x.de, stored)]):
        d = layout.sum_value_heads(d, min(static.group, heads))  # [key tiles, C, KL]
        if static.normalise:
            d = keys.together(tiles.l2norm_gradient(keys.apart(keys.load(source, valid=valid)), keys.apart(d)))
        keys.store(ref, d, at)


def _store_in_lanes(ref, x, span: chunk_spans.Span, stored, C: int) -> None:
    """Store a number per token x [heads, C]; if `stored` is not None, only for the rows of the span."""
    ref[...] = x if stored is None else jnp.where(span.columns(C), x, ref[...])


def through_law(refs: KdaRefs, valid, dg, static: KdaStatic, before=None):
    """Return the gradient of raw gates for the gradient dg [C, t KL] of decays; add to dA_log and ddt_bias.

    A gradient `before` is in dA_log and ddt_bias already.
    """
    A_log, dt_bias, raw = refs.law[:1], refs.law[1:], static.keys.spread(refs.g[...])  # [1, t KL], [C, t KL]
    assert static.gate_law is not None
    gradient = functools.partial(static.gate_law.gradient, raw.astype(jnp.float32), A_log, dt_bias)
    # Raw gates of rows that are not valid may be anything, and zero times NaN is NaN.
    select = lambda x: x if valid is None else jnp.where(valid, x, 0.0)
    found = dx, dA = [select(x) for x in gradient(dg)]  # each [C, t KL]
    if before is not None:
        dx, dA = [select(x) for x in gradient(dg - before)]
    refs.dlaw[...] += jnp.concatenate([jnp.sum(x, axis=0, keepdims=True) for x in (dA, dx)])
    return found[0]


def not_finite(refs: KdaRefs, static: KdaStatic) -> jax.Array:
    """Return which rows of the chunk are not finite, float32 [1, C, 1]."""
    if refs.v_new_over_beta is None:
        of_values = nonfinite.rows_not_finite(static.values.load(refs.do))
        return jnp.maximum(of_values, loads.tokens_not_finite(refs, static))
    # The forward stored NaN in v_new_over_beta of sequences that it found to be not finite.
    return nonfinite.rows_not_finite(*(static.values.load(ref) for ref in (refs.do, refs.v_new_over_beta)))


def plan(
    x: KdaOperands, static: KdaStatic, outputs: tuple[str, ...], operator: str, body: Callable = _bwd_kernel
) -> dict[str, Any]:
    """Return the launch of the backward, the arguments of `launcher.launch`; `finish` takes its results.

    Args:
      x: the operands. Values are read only with write gates, initial states never; h and v_new_over_beta are needed
        only for gradients of tokens.
      static: the static description.
      outputs: dq, dk, dv, dg, dbeta, with or without de, db, dw, dlaw and dh0; or dh0 alone.
      operator: the operator's name, for the name of the kernel.
      body: the body of the kernel, called with the Refs and the static description.
    """
    B, HV, C, K, V, heads = static.B, static.HV, static.C, static.K, static.V, static.config.heads_bwd
    (keys, share), p, blocks, of_tokens = static.key_blocks(heads), static.p, HV // heads, "dq" in outputs
    cut = chunk_loop.blocks_backwards(static)
    key = cut.tokens(keys * K, share)
    of_state = heads // static.m, V, static.keys.used
    value, channels, state, KL = cut.tokens(heads * V), cut.tokens(heads * K), cut.state(*of_state), static.keys.size
    (beta, row), (g, gate) = (
        of(y, static, heads, cut) for of, y in ((loads.rows_block, x.beta), (loads.gates_block, x.g))
    )
    values = x if of_tokens and x.w is not None else KdaOperands()
    # If a block of heads is a part of a group of value heads, it writes a partial sum over the group, beside the sums
    # of other blocks.
    d_keys = cut.tokens(keys * K), (*x.q.shape[:2], blocks * keys * K), x.q.dtype if share == 1 else jnp.float32
    base, may_forget = (static.base, static.may_forget) if of_tokens else (0, False)
    early = static.erase_before_decay
    levels = lambda base: jnp.asarray(tile_bwd.pair_table(C, base, early))
    decays = functools.partial(loads.decays_scratch, static=static, base=1 if may_forget else base)
    scratch: dict[str, Any] = {"decays": decays(static.chunks * heads)}
    if may_forget:
        most = min(static.chunks * heads, max(heads, GROUP))
        scratch |= {"exact_decays": decays(p), "beyond": (most // static.m, 4 * C, KL)}
        scratch |= {"tensors": (most // static.m, 3 * C, KL), "d_scores": (most // p, 2 * C, p * C)}
    if "dh0" not in outputs:
        scratch["dstate"] = of_state
    if x.owner is not None and base > 1:
        scratch["continuing"] = *((static.chunks,) if static.chunks > 1 else ()), C, packed.LANES
    estimate = config.cost if of_tokens else config.states_cost
    gates = {"db": (channels, x.b), "dw": (value, x.w)}
    return dict(
        body=functools.partial(body, static=static),
        refs=KdaRefs,
        name=f"chunk_{operator}_{'bwd' if of_tokens else 'bwd_state'}_c{C}",
        grid=(B, blocks, static.spans),
        tables={"table": x.table},
        inputs={
            "levels": (levels(base) if base else None, windows.along((2 * C, C))),
            "exact_levels": (levels(1) if may_forget else None, windows.along((2 * C, C))),
            "q": (x.q, key),
            "k": (x.k, key),
            "g": (g, gate),
            "beta": (beta, row),
            "v": (values.v, value),
            "e": (x.e, key),
            "b": (x.b, channels),
            "w": (values.w, value),
            "owner": (x.owner, cut.owner(C)),
            "h": (x.h, cut.per_chunk(*of_state)),
            "v_new_over_beta": (x.v_new_over_beta, value),
            "A_inv": (x.A_inv, cut.per_chunk(heads // p, C, p * C)),
            "scores": (x.scores, cut.per_chunk(heads // p, 2 * C, p * C)),
            "do": (x.do, value),
            "dht": (x.dht, state),
            "law": (x.law, windows.along((2, heads // static.m * KL), None, 1)),
        },
        outputs={
            "dq": d_keys,
            "dk": d_keys,
            "dv": (value, x.do.shape, x.do.dtype),
            **({} if g is None else {"dg": (gate, g.shape, g.dtype)}),
            "dbeta": (row, beta.shape, jnp.float32),
            "de": d_keys,
            **{name: (block, y.shape, y.dtype) for name, (block, y) in gates.items() if y is not None},
            "dh0": (state, (static.N, HV // static.m, *of_state[1:]), jnp.float32),
            # One sum for every row of the batch; the spans of the row add to it.
            "dlaw": (
                windows.along((None, 2, heads // static.m * KL), 0, None, 1),
                (B, 2, HV // static.m * KL),
                jnp.float32,
            ),
        },
        requested=outputs,
        like=x.gradients(),
        scratch=scratch,
        cost_estimate=estimate(**static.sizes(), itemsize=x.q.dtype.itemsize, backward=True, more=loads.more_bytes(x)),
    )


def finish(gradients: dict[str, jax.Array], x: KdaOperands, static: KdaStatic) -> dict[str, jax.Array]:
    """Return the gradients that the launch of a `plan` gives, summed over blocks and with the shapes of their operands.

    dbeta is float32, and dh0 [N, HV, V, K] float32 is the gradient of the initial states.
    """
    for name, y in (("dbeta", x.beta), ("dg", x.g)):
        if name in gradients:
            gradients[name] = jax.tree.map(lambda d, y: d.reshape(y.shape), gradients[name], y)
    if "dlaw" in gradients:
        gradients["dlaw"] = jnp.sum(gradients["dlaw"], axis=0)
    share = static.key_blocks(static.config.heads_bwd)[1]
    for name in ("dq", "dk", "de"):
        if name in gradients and share > 1:
            gradients[name] = jax.tree.map(functools.partial(_sum_blocks, static, share), gradients[name])
            gradients[name] = gradients[name].astype(x.q.dtype)
    return gradients


def _sum_blocks(static: KdaStatic, share: int, d: jax.Array) -> jax.Array:
    """Return the gradient of keys or queries as a sum over the `share` blocks of heads that each wrote a part of it."""
    each = d.reshape(*d.shape[:2], static.H, share, static.K)
    return jnp.sum(each, axis=3).reshape(*d.shape[:2], -1)
