"""The forward of Kimi delta attention in one launch: loads and stores, kernel body, launcher.

With K, Q, V the rows of a chunk, S the state before it, B = diag(beta), D_ij = e^(G_i - G_j) per channel, and <.>_D the
products of `tile.interaction_tile`,

    A_inv = (I + tril(<E, K>_D, -1) B)^-1         P = scale tril(<Q, K>_D) B      no state in them
    R = V - (E e^G) S                             values less the state's values of their keys
    U = A_inv R                                   v_new over beta: the new values are v_new = B U
    o = scale (Q e^G) S + P U                     S' = e^G_last S + (K e^(G_last - G))^T B U

E are the erase keys: in Kimi delta attention they are K. GDN-2 and Comba run these kernels, too: E are then other rows,
or keys times erase gates, and write gates multiply V where it is loaded. Erase keys that read the state before the
decay of their token have the G of the row before, in <E, K>_D and in E e^G. There is no other difference.

The kernels hold every state transposed, [V, K]: a decay per channel then multiplies its lanes. One grid step makes P of
a chunk, and the part of A_inv that takes no products; the next grid step takes the state through the chunk. So the two
halves of a grid step do not wait for one another. With bfloat16 tensors S and the rows of decayed queries and keys
enter their products as bfloat16. A_inv, P, R, U and the decayed keys as columns must not be rounded to 8 bits: where
keys repeat, U oscillates and sums over it cancel. They keep 16 bits, as two bfloat16 parts.

Chunks of a packed batch without states, or of rows of segments, may hold several sequences or padding. Only grid steps
with such a chunk compute with masks. Sequences that are not finite are zero there in all products, see
shared.kernels.spans.nonfinite, and all their results in that chunk, in all heads of the block, become NaN.

Where tokens are split over devices, a map of them is made first: by `kernel_map`, or by the same kernel without the
output o, which takes states with more channels than v through the tokens, and writes A_inv and the scores. With these
as inputs, the second run makes only the decays from the start and to the end of chunks, and no product until it has
the state.

The [C, C] matrices of p heads lie side by side in the lanes ("packed", see shared.kernels.packed).
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from chunkwise.kda import config, loads, tile
from chunkwise.kda.operands import KdaOperands, KdaRefs, KdaStatic
from chunkwise.shared import compat, tuning
from chunkwise.shared.kernels import inverse, matmul, packed, tiles, windows
from chunkwise.shared.kernels.spans import chunk_loop, schedule, stage_chunks
from chunkwise.shared.kernels.spans.operands import ABSENT

# Heads that take the state through a chunk together: in a launch that makes the inverse and the output, and in others.
STAGE, HALF_STAGE = 4, 8
# What the first stage of a grid step leaves for the last one; the spans of a row from which on they are three stages.
IN_SLOTS, LONG = ("readers", "ends", "through", "P"), 10


def _fwd_kernel(refs: KdaRefs, *, static: KdaStatic) -> None:
    """Take the state through the chunk prev and prepare the chunk cur, of the next grid step."""
    chunk_loop.run_forward(
        refs,
        functools.partial(_grid_step, static=static),
        static,
        tokens_not_finite=functools.partial(loads.tokens_not_finite, refs, static),
        values_not_finite=functools.partial(loads.values_not_finite, refs, static),
        transposed=True,
    )


def _grid_step(refs: KdaRefs, cur: stage_chunks.StageChunk, prev: stage_chunks.StageChunk, static: KdaStatic) -> None:
    """Run both stages of a grid step."""
    heads, C, p, dtype = static.config.heads, static.C, static.p, refs.v.dtype
    valid, masks = cur.valid, cur.masks
    if masks is not None:
        loads.store_continuing(refs.continuing, masks)
    gates, betas = loads.load_gates(refs, valid, static)  # [C, heads K], [heads, C]
    # Made here, because after the products it would cost 3 % of the cycles.
    beta_rows = packed.side_lanes(betas[:, None], p)  # [heads / p, 1, p C]
    load_q, load_unit = by_head(refs, valid, static)

    # Products for cur do not wait for products for prev, so the two alternate, pack by pack.
    staged, passing = [], pass_chunk(refs, prev, static, dtype)
    preparing = (
        staged.append((n, *prepare(refs, n, load_q, load_unit, gates, betas, valid, masks, static)))
        for n in range(0, heads, p)
    )
    kernel, packs = "fwd" if refs.o is not None else "summary", heads // p
    order = tuning.find_order("chunkwise.kda", kernel, static.order_size, "pm" * packs)
    schedule.interleave(order, p=passing, m=preparing)
    schedule.finish(preparing)
    # The factors are made late, so that no product waits for the lengths of rounded keys.
    factors, beta_rows = rounded_betas(refs, load_unit, betas, valid, static, beta_rows)
    A: jax.Array | None = None
    blocks: jax.Array | None = None
    if refs.A_inv is None:
        A = jnp.concatenate([scores[:, C:] for *_, scores in staged]) * beta_rows  # [heads / p, C, p C]
        blocks = inverse.begin_inverse(A)  # [heads / p, 16, p C]
    schedule.finish(passing)
    # Stored late, because prev is read from the same scratch memory until the state has gone through it.
    if refs.A_inv is None:
        refs.blocks[...], refs.A[...] = blocks, A
    for n, boundary, scores in staged:
        store_pack(refs, n, boundary, scores, beta_rows, factors[n : n + p], static)
    packs = [(0, n) for n in range(0, heads, p)]
    prepare_beyond_base(refs, [refs], [cur], [(gates, betas)], [beta_rows], packs, static)


def by_head(refs: KdaRefs, valid, static: KdaStatic) -> tuple[Callable, Callable]:
    """Return functions that load a tile of queries and of keys of cur: `loads.load_keys` and `loads.load_unit_keys`.

    They load one tile at a time, because all heads at once would not stay in registers.
    """
    load_q = functools.cache(lambda i: loads.load_keys(refs.q, valid, static, slice(i, i + 1)))
    load_unit = functools.cache(lambda i: loads.load_unit_keys(refs, valid, static, slice(i, i + 1)))
    return load_q, load_unit


def load_each(refs: list[KdaRefs], cur: list, static: KdaStatic) -> tuple[list[tuple], list[tuple], list]:
    """Return of several chunks the results of `loads.load_gates`, of `by_head` and of `rounded_betas`."""
    of = lambda f: [f(x, chunk.valid, static) for x, chunk in zip(refs, cur, strict=True)]
    gated, loaders = of(loads.load_gates), of(by_head)
    each = zip(refs, cur, loaders, gated, strict=True)
    return gated, loaders, [rounded_betas(x, load[1], y[1], chunk.valid, static) for x, chunk, load, y in each]


def rounded_betas(
    refs: KdaRefs, load_unit: Callable, betas, valid, static: KdaStatic, beta_rows=None
) -> tuple[list, jax.Array]:
    """Return the factors of all heads that make up for the rounding of keys, and betas times these factors.

    The factors are [1, C, 1] each, or None; the betas are rows of packs [heads / p, 1, p C]. Without factors, the
    second result is `beta_rows`.
    """
    by_tile = [load_unit(i // static.group)[2] for i in range(static.config.heads // static.m)]  # each [m, C, 1]
    factors: list = [None] * static.config.heads
    if by_tile[0] is not None:
        if refs.b is not None:
            for i in range(len(by_tile)):
                k, e, _ = load_unit(i // static.group)
                e = loads.gated_keys(refs, k, e, valid, static, slice(i, i + 1))
                by_tile[i] = by_tile[i] * loads.gated_rounding(k, e, static.keys)
        factors = [x if static.m == 1 else x[j : j + 1] for x in by_tile for j in range(static.m)]
        betas, beta_rows = betas * loads.rows_of_heads([x[0] for x in factors]), None
    return factors, packed.side_lanes(betas[:, None], static.p) if beta_rows is None else beta_rows


def prepare(
    refs: KdaRefs, n: int, load_q, load_unit, gates, betas, valid, masks, static: KdaStatic, upright: bool = True
):
    """Return the arrays of cur, for the pack of heads that begins with n, that the next grid step needs.

    Args:
      refs, static: the Refs and the static description of the kernel.
      n: the first head of the pack.
      load_q, load_unit: the results of `by_head`.
      gates, betas: the results of `loads.load_gates`.
      valid, masks: of the rows of cur, as in `StageChunk`.
      upright: as in `tile.pack_scores`.

    Returns:
      The result of `pack_boundary`, and the result of `pack_scores`, or None if the scores are precomputed.
    """
    dtype, base = refs.v.dtype, static.base if refs.A_inv is None else 0
    at = static.tiles(slice(n, n + static.p))
    pack = range(at.start, at.stop)
    q = jnp.concatenate([load_q(i // static.group) for i in pack])
    k, *e = (
        jnp.concatenate([load_unit(i // static.group)[j] for i in pack]) for j in range(1 if refs.e is None else 2)
    )
    e = loads.gated_keys(refs, k, e[0] if e else None, valid, static, at)
    lane = at.start * static.keys.size
    q, g = q * static.scale, gates[:, lane : at.stop * static.keys.size]
    if refs.law is not None:
        # These are made pack by pack, because all decays at once would not stay in registers.
        exact = matmul.operand_dtype(dtype) == jnp.float32
        g = loads.decays_of(g, refs, valid, static, lane, tiles.LOG2_E, exact)
    continuing = None if masks is None else refs.continuing
    early, first = static.erase_before_decay, lane // packed.LANES
    loads.store_block_decays(refs.decays, g, base, continuing, first, refs.law is None, early)
    decays = loads.load_decays(refs.decays, pack, static, base)
    beta = static.keys.together(tiles.to_column(betas[n : n + static.p, None]))
    # If the scores are precomputed, no decay between two rows of the chunk is needed.
    scores = None
    if refs.A_inv is None:
        scores = tile.pack_scores(q, e, k, decays, refs.levels[...], masks, dtype, static.keys, upright)
    return tile.pack_boundary([q, e] if refs.o is not None else [e], k, beta, decays, masks), scores


def prepare_beyond_base(
    refs: KdaRefs, views: list[KdaRefs], cur: list, gated: list, beta_rows: list, packs: list, static: KdaStatic
) -> None:
    """Make the scores of packs (chunk, first head) once more where they have rows that base blocks cannot have.

    Such rows are rare, and products for every level are too expensive to be made in every grid step. `views` are the
    Refs of each chunk of `cur`, and `gated` and `beta_rows` its gates and step sizes, as in `prepare_exactly`.
    """
    if refs.exact_levels is None:
        return

    @pl.when(loads.beyond_base(refs.decays, range(len(views) * static.config.heads // static.m), static))
    def _():
        for i, n in packs:
            again = functools.partial(
                prepare_exactly, views[i], n, *gated[i], beta_rows[i], cur[i].valid, cur[i].masks, static
            )
            at = static.tiles(slice(n, n + static.p))
            pl.when(loads.beyond_base(views[i].decays, range(at.start, at.stop), static))(again)


def prepare_exactly(refs: KdaRefs, n: int, gates, betas, beta_rows, valid, masks, static: KdaStatic) -> None:
    """Make the scores of a pack once more with a product for every level, and store the rows beyond base blocks.

    Other rows stay as they are: no bit of their results may depend on later gates. `beta_rows` are the second result of
    `rounded_betas`; the other arguments are as in `prepare`.
    """
    C, p, packs = static.C, static.p, slice(n // static.p, n // static.p + 1)
    at = static.tiles(slice(n, n + p))
    beyond = loads.rows_beyond_base(refs.decays, range(at.start, at.stop), static)  # [1, C, p C]
    exact = dataclasses.replace(static, base=1)
    load_q, load_unit = by_head(refs, valid, exact)
    of_levels = refs._replace(levels=refs.exact_levels)
    _, scores = prepare(of_levels, n, load_q, load_unit, gates, betas, valid, masks, exact)
    assert scores is not None
    if refs.scores_prev is not None:
        chosen = jnp.where(tile.twice(beyond) > 0.0, scores, tile.transposed(refs.scores_prev[n : n + p]))
        refs.scores_prev[n : n + p] = jnp.swapaxes(chosen[0], 0, 1).reshape(p, C, 2 * C)
        return

    def store(ref, x) -> None:
        chosen = packed.concat_lanes([beyond] * (x.shape[2] // (p * C)))
        chosen = packed.concat_rows([chosen] * (x.shape[1] // C))
        ref[packs] = jnp.where(chosen > 0.0, x, ref[packs].astype(jnp.float32)).astype(ref.dtype)

    store(refs.A, scores[:, C:] * beta_rows[packs])
    if refs.blocks is not None:
        refs.blocks[packs] = inverse.begin_inverse(refs.A[packs])
    if refs.o is not None:
        store(refs.P, score_parts(scores, beta_rows[packs], refs.v.dtype).astype(jnp.float32))
    if refs.scores_out is not None:
        store(refs.scores_out, scores)


def score_parts(scores, beta_row, dtype) -> jax.Array:
    """Return the scores of queries, from the result of `pack_scores`, times beta, parts side by side."""
    return packed.concat_lanes(packed.split_bf16(scores[:, : scores.shape[1] // 2] * beta_row, dtype))


def store_pack(refs: KdaRefs, n: int, boundary, scores, beta_rows, factors, static: KdaStatic) -> None:
    """Store the results of `prepare` for the next grid step; `factors` are from `loads.load_unit_keys`."""
    (readers, ends, through), dtype = boundary, refs.v.dtype
    ends = ends if factors[0] is None else ends * static.keys.together(jnp.concatenate(factors))
    pack, packs = static.tiles(slice(n, n + static.p)), slice(n // static.p, n // static.p + 1)
    refs.readers[pack] = readers.astype(refs.readers.dtype)
    refs.ends[pack], refs.through[pack] = packed.concat_rows(packed.split_bf16(ends, dtype)), through
    scores = refs.scores[packs] if scores is None else scores  # [1, 2 C, p C]
    if refs.o is not None:
        refs.P[packs] = score_parts(scores, beta_rows[packs], dtype)
    if refs.scores_out is not None:
        refs.scores_out[packs] = scores


def stages_of(static: KdaStatic, most: int) -> list[slice]:
    """Return slices of heads that take the state through a chunk together, of at most `most` tiles."""
    heads, p = static.config.heads, static.p
    size = max(n for n in range(p, max(p, most * static.m) + 1, p) if heads % n == 0)
    return [slice(n, n + size) for n in range(0, heads, size)]


def pass_chunk(refs: KdaRefs, prev: stage_chunks.StageChunk, static: KdaStatic, dtype) -> Iterator[None]:
    """Finish the inverse of prev and take the state through prev; yield where other products may stand."""
    A_inv = None if refs.A_inv is None else refs.A_inv[...]  # [heads / p, C, p C]
    if refs.A_inv is None:
        parts = 3 if matmul.operand_dtype(dtype) == jnp.float32 else 2
        for product in inverse.block_doubling(refs.blocks[...], refs.A[...], parts):
            A_inv = product  # the last value is the inverse
            yield
    if refs.A_inv_out is not None:
        refs.A_inv_out[...] = A_inv
    stages = stages_of(static, STAGE if refs.o is not None and refs.A_inv is None else HALF_STAGE)
    # Around a grid step of one chunk, `run_forward` looks after states and results that are not finite.
    alone = prev._replace(masks=ABSENT)
    yield from schedule.software_pipeline(
        pass_state(refs, alone, chunk_loop.load_state(refs, prev, static.tiles(stage)), A_inv, stage, static)
        for stage in stages
    )


def pass_state(
    refs: KdaRefs, prev: stage_chunks.StageChunk, S, A_inv, heads: slice, static: KdaStatic
) -> Iterator[None]:
    """Write the output of some heads of prev and take their state S [t, V, m K] through it; yield between products."""
    C, p, packs = static.C, static.p // static.m, slice(heads.start // static.p, heads.stop // static.p)
    valid, dtype, keys, values, at = prev.valid, refs.v.dtype, static.keys, static.values, static.tiles(heads)
    if refs.h is not None:
        refs.h[at] = S.astype(refs.h.dtype)
    channels, readers = packed.pad_lanes(static.m * S.shape[1]), refs.readers[at]
    opened = keys.open_state(S.astype(readers.dtype), channels)  # [t, VL, KL]
    state_reads = tile.read_state(readers, opened)  # [t, 2 C or C, VL]
    yield
    v = loads.load_values(refs, valid, static, at)  # [t, C, VL]
    if channels > values.size:  # channels without values
        v = packed.concat_lanes([v, jnp.zeros((*v.shape[:2], channels - values.size), jnp.float32)])
    A_inv_parts = packed.concat_lanes(packed.split_bf16(A_inv[packs], dtype))
    multiply = lambda A, x: packed.multiply_packed(A, values.below(x), p, dtype)  # [t, C, VL]
    v_new_over_beta = multiply(A_inv_parts, v - state_reads[:, -C:])
    # Pieces share a chunk, so each stores only its rows. Otherwise all rows are stored, because nobody reads rows past
    # the last token.
    stored = valid if static.varlen else None
    if refs.v_new_over_beta is not None:
        values.store(refs.v_new_over_beta, prev.poisoned(v_new_over_beta), stored, at.start)
    yield
    if refs.o is not None:
        o = state_reads[:, :C] + multiply(refs.P[packs], v_new_over_beta)  # [t, C, VL]
        values.store(refs.o, prev.poisoned(o), stored, at.start)
    ends = refs.ends[at]  # [t, parts C, KL]
    ends = [ends[:, i : i + C] for i in range(0, ends.shape[1], C)]
    S = keys.cut(prev.decay_out(refs.through[at], prev.ending)) * S
    written = tile.write_state(packed.split_bf16(v_new_over_beta, dtype), ends)  # [t, VL, KL]
    refs.state[at] = S + keys.close_state(written, S.shape[1])  # [t, V, m K]


def count_stages(static: KdaStatic) -> int:
    """Return the stages of a grid step.

    A long row of two to four chunks a grid step has one more, for the inverse. Narrow matrix units, those of v5e and
    v5p, are busy without it; the way of the state through more chunks is longer than everything else.
    """
    long = 1 < static.chunks <= 4 and not static.varlen and static.spans >= LONG
    return 3 if long and compat.matrix_columns() > 128 else 2


def _scratch(x: KdaOperands, static: KdaStatic, outputs: tuple[str, ...], base: int, channels: int) -> dict[str, Any]:
    """Return the buffers of `launch`: what a grid step leaves for the next one, and the decays, of this base.

    The state, [V, m K] with `channels` rows, is one of them unless the output ht holds it, and the owners, by which the
    next grid step keeps the sequences of this chunk apart.
    """
    C, KL, operand = static.C, static.keys.size, matmul.operand_dtype(x.v.dtype)
    heads = static.chunks * static.config.heads
    t = heads // static.m
    n, lanes, parts, with_output = heads // static.p, static.p * C, 2 if operand == jnp.bfloat16 else 1, "o" in outputs
    scratch: dict[str, Any] = {
        "readers": pltpu.VMEM((t, (1 + with_output) * C, KL), operand),
        "ends": pltpu.VMEM((t, parts * C, KL), operand),
        "through": pltpu.VMEM((t, 1, KL), jnp.float32),
        "decays": loads.decays_scratch(heads, static, base),
    }
    each, slots = (static.chunks,) if static.chunks > 1 else (), count_stages(static) - 1
    if x.A_inv is None:
        scratch |= {"blocks": (n, inverse.first_block_rows(C), lanes)} if slots == 1 else {"inverses": (n, C, lanes)}
        scratch["A"] = n, C, lanes
    if with_output:
        scratch["P"] = pltpu.VMEM((n, C, parts * lanes), operand)
    if each:
        handed = {name: scratch[name] for name in IN_SLOTS if name in scratch}
        scratch |= {name: pltpu.VMEM((slots, *y.shape), y.dtype) for name, y in handed.items()}
    if "ht" not in outputs:
        scratch["state"] = static.config.heads // static.m, channels, static.keys.used
    if x.owner is not None:
        scratch["nonfinite_rows"] = slots, *each, C, 1
        if not each:
            scratch["owner_prev"] = pltpu.VMEM((1, 1, C), jnp.int32)
        if static.base > 1 and x.A_inv is None:
            scratch["continuing"] = *each, C, packed.LANES
    return scratch


def plan(
    x: KdaOperands, static: KdaStatic, outputs: tuple[str, ...], operator: str, body: Callable = _fwd_kernel,
    scratch: dict[str, Any] | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Return the launch of the forward, or of the part that makes these outputs: the arguments of `launcher.launch`.

    Without the output o no query reads the state, and the initial states may have more channels than v. The values of
    these channels are zeros, which no array holds.

    Args:
      x: the operands. A_inv and scores of an earlier launch are not computed again.
      static: the static description.
      outputs: names of outputs.
      operator: the operator's name, for the name of the kernel.
      body: the body of the kernel, called with the Refs and the static description.
      scratch: its buffers; by default a forward's. With M the second of three stages has values, inverses and scores.

    Returns:
      The arguments. The launch gives a dict of these outputs: o [B, T, HV V] in the type of v; ht, the final states
      [N, HV / m, V, m K] float32; h, the states before every span [B, spans, HV / m, V, m K] in the type of products;
      in float32, M [N, HV, K, K], transposed,
      v_new_over_beta laid out as v, packed A_inv [B, spans, HV / p, C, p C], and packed scores of queries above scores
      of keys [B, spans, HV / p, 2 C, p C]; and pool_out, the pool, updated in place.
    """
    B, HV, C, K, V, heads = static.B, static.HV, static.C, static.K, static.V, static.config.heads
    NT = static.spans * static.chunks if static.varlen else -(-static.T // C)
    p, dtype, inverts, with_output = static.p, x.v.dtype, x.A_inv is None, "o" in outputs
    (keys, share), m = static.key_blocks(heads), static.m
    channels = V if x.initial_state is None else x.initial_state.shape[2]
    operand, base = matmul.operand_dtype(dtype), static.base if inverts else 0
    may_forget = inverts and static.may_forget
    stages = 3 if "M" in outputs else count_stages(static)
    cur, second, prev = (chunk_loop.blocks(static, stage, stages) for stage in (0, 1, stages - 1))
    of_values, of_scores = (second, second) if "M" in outputs else (prev, cur)
    key, value = cur.tokens(keys * K, share), of_values.tokens(heads * V)
    matrix, both, of_state = (heads // p, C, p * C), (heads // p, 2 * C, p * C), (heads // m, channels, m * K)
    state, levels = prev.state(*of_state), lambda base: jnp.asarray(tile.table_of(C, base, m))
    of_levels = windows.along((C, 2 * C) if m == 1 else (2 * C, m * C))
    slot = heads, *(() if x.pool is None else x.pool.shape[2:])
    available = {
        "o": (value, x.v.shape, dtype),
        "ht": (state, (static.N, HV // m, *of_state[1:]), jnp.float32),
        "M": (prev.state(heads, K, K), (static.N, HV, K, K), jnp.float32),
        "h": (prev.per_chunk(*of_state), (B, NT, HV // m, *of_state[1:]), operand),
        "v_new_over_beta": (value, x.v.shape, jnp.float32),
        "A_inv": (second.per_chunk(*matrix), (B, NT, HV // p, C, p * C), jnp.float32),
        "scores": (of_scores.per_chunk(*both), (B, NT, HV // p, 2 * C, p * C), jnp.float32),
    }
    if x.pool is not None:
        available["pool_out"] = prev.target(*slot), x.pool.shape, x.pool.dtype
    return dict(
        body=functools.partial(body, static=static),
        refs=KdaRefs,
        name=f"chunk_{operator}_{'fwd' if with_output else 'summary'}_c{C}",
        # More grid steps, because the state goes through a chunk one or two grid steps after the chunk is prepared.
        grid=(B, HV // heads, x.spans(static) + stages - 1),
        tables={"table": x.table},
        inputs={
            "levels": (levels(base) if inverts else None, of_levels),
            "exact_levels": (levels(1) if may_forget else None, of_levels),
            "q": (x.q, key),
            "k": (x.k, key),
            "v": (x.v, value),
            "g": loads.gates_block(x.g, static, heads, cur),
            "beta": loads.rows_block(x.beta, static, heads, cur),
            "e": (x.e, key),
            "b": (x.b, cur.tokens(heads * K)),
            "w": (x.w, value),
            "owner": (x.owner, cur.owner(C)),
            **({} if static.chunks == 1 else {"owner_prev": (x.owner, prev.owner(C))}),
            "initial_state": (x.initial_state, state),
            "law": (x.law, windows.along((2, heads // m * static.keys.size), None, 1)),
            "pool": (x.pool, prev.state(*slot)),
            "A_inv": (x.A_inv, of_values.per_chunk(*matrix)),
            "scores": (x.scores, of_scores.per_chunk(*both)),
        },
        outputs=available,
        requested=outputs,
        like={"o": x.q},
        scratch=scratch or _scratch(x, static, outputs, 1 if may_forget else base, channels),
        in_place={} if x.pool is None else {"pool": "pool_out"},
        cost_estimate=(config.cost if with_output else config.states_cost)(
            **static.sizes() | {"V": channels + K * ("M" in outputs)}, itemsize=dtype.itemsize, more=loads.more_bytes(x)
        ),
    )
