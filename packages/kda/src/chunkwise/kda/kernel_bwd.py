"""The backward of Kimi delta attention in one launch, steps in reverse: tile mathematics, kernel body, launcher.

States and their gradients are transposed, [V, K]. With the names of kernel.py, A = <Q, K>_D and N = tril(<K, K>_D, -1)
without beta, Q scaled, and dS' arriving from the right:

    dv_new = A^T dO + (K e^(G_last - G)) dS'      dR = X^T B dv_new      dV = dR
    dA = tril(dO W^T) B                           dN = -tril(dR W^T, -1) B
    dS = e^G_last dS' + (Q e^G)^T dO - (K e^G)^T dR

dA and dN go back through the products of every level, each with its own factors of rows and of columns. None is above
one, but with a bound on the gates those of base blocks: at most 2^96, and every pair of them multiplies to a decay.
X, W, A, N and S before every step are kept by the forward. As there, what oscillates where keys repeat (W, dv_new,
dA and dN) keeps 16 bits with bfloat16 tensors.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from chunkwise.kda import cost, kernel, tile
from chunkwise.shared import compat
from chunkwise.shared.kernels import launcher, laws, layout, matmul, nonfinite, packed, tiles
from chunkwise.shared.kernels.operands import Operands


def pair_table(C: int, base: int) -> np.ndarray:
    """Return int32 [2 C, C], which product holds the pair of row i, of queries, then of keys, and column j < i."""
    table = tile.level_table(C, base)[:, C:].T
    return np.concatenate([table, table])


def unpacked(x, p: int):
    """Return packed matrices [n, R, p C] transposed, head by head, [n p, C, R]."""
    turned = jnp.concatenate([jnp.swapaxes(x[i], 0, 1) for i in range(x.shape[0])])
    return turned.reshape(x.shape[0] * p, -1, x.shape[1])


def interaction_bwd_tile(q, k, decays: tile.Decays, table, d, p: int, dtype):
    """Return the gradients of `tile.interaction_tile` of rows [h, 2 C, K] and of k as columns [h, C, K].

    Only of pairs i > j: the diagonal has no gate, and a gate's gradient would be the difference of its two equal parts.

    Args:
      q, k, decays, dtype: as there.
      table: `pair_table`.
      d: packed gradient [n, 2 C, p C] of the scores of queries above those of keys.
      p: heads of a pack.
    """
    operand = matmul.operand_dtype(dtype)
    stacked, turned = packed.rows([q, k]), unpacked(d, p)  # [h, 2 C, K], [h, C, 2 C]
    pairs = jnp.concatenate([table] * p, axis=1)[None]  # [1, 2 C, p C]
    pairs_turned = jnp.swapaxes(table, 0, 1)[None]  # [1, C, 2 C]
    split = [y.astype(jnp.float32) for y in packed.parts(d, dtype)]  # each [n, 2 C, p C]
    d_rows, d_columns = jnp.zeros_like(stacked), jnp.zeros_like(k)  # [h, 2 C, K], [h, C, K]
    for x in tile.level_factors(decays):
        if x.b is None:  # all rows and columns take part, and the table selects
            columns, decayed = k * x.columns, stacked * x.rows  # [h, C, K], [h, 2 C, K]
            mine, left = split, turned
            here, here_turned = pairs == x.index, pairs_turned == x.index
        else:  # only right halves have pairs as rows, left halves as columns; the others meet zeros
            columns = tile.halves(k, x.b)[0] * x.columns  # [h, C / 2, K]
            columns = tile.join_halves(columns, columns, x.b)  # [h, C, K]
            decayed = tile.halves(stacked, x.b)[1] * x.rows  # [h, C, K]
            decayed = tile.join_halves(decayed, decayed, x.b)  # [h, 2 C, K]
            mine = [tile.halves(y, x.b)[1] for y in split]  # each [n, C, p C]
            left = tile.halves(turned, x.b)[0]  # [h, C / 2, 2 C]
            here, here_turned = tile.halves(pairs, x.b)[1] == x.index, tile.halves(pairs_turned, x.b)[0] == x.index
        mine = packed.lanes([jnp.where(here, y, 0.0).astype(operand) for y in mine])  # [n, 2 C or C, parts p C]
        add_rows = x.rows * packed.multiply_packed(mine, columns.astype(operand), p, dtype)  # [h, 2 C or C, K]
        turned_parts = packed.parts(jnp.where(here_turned, left, 0.0), dtype)  # each [h, C or C / 2, 2 C]
        product = matmul.dot(
            packed.lanes(turned_parts), packed.rows([decayed.astype(operand)] * len(turned_parts))
        )  # [h, C or C / 2, K]
        add_columns = x.columns * product  # likewise
        if x.b is None:
            d_rows, d_columns = d_rows + add_rows, d_columns + add_columns
        else:
            untouched, right = tile.halves(d_rows, x.b)
            d_rows = tile.join_halves(untouched, right + add_rows, x.b)  # [h, 2 C, K]
            left, untouched = tile.halves(d_columns, x.b)
            d_columns = tile.join_halves(left + add_columns, untouched, x.b)  # [h, C, K]
    return d_rows, d_columns


class Outer(NamedTuple):
    """The gradients that pass between the chunk's values, its scores and the state.

    Attributes:
      dv: [h, C, V], of the values, which is dR.
      d_scores: packed [n, 2 C, p C], of the scores of queries above those of keys, pairs i > j.
      d_start: [h, 2 C, K], of queries above keys, through the state before the chunk.
      d_end: [h, C, K], of keys, through the state after it.
      d_itself: [h, C, 1], of the product of every query with the key of its row.
      later: [h, 1, K], what passes through the state to all gates.
      beta: [h, C, 1], and packed as rows [n, 1, p C]: their sum is the gradient.
      S: [h, V, K], of the state before the chunk.
    """

    dv: jax.Array
    d_scores: jax.Array
    d_start: jax.Array
    d_end: jax.Array
    d_itself: jax.Array
    later: jax.Array
    beta: tuple[jax.Array, jax.Array]
    S: jax.Array


def back_to_values(k, beta, boundary, X, scores, do, dS, dtype):
    """Return what reaches the values of a chunk, [h, C, V] each; this needs neither the state nor the values.

    Args:
      k, beta, boundary, do, dS, dtype: as in `outer_bwd_tile`, and of `kept` there X and scores.

    Returns:
      What reaches the new values from outputs and from the state after the chunk, and dR, the gradient of the values.
    """
    C, p, operand = k.shape[1], k.shape[0] // X.shape[0], matmul.operand_dtype(dtype)
    _, to_end, _ = boundary
    written = matmul.dot_nt((k * to_end).astype(operand), dS.astype(operand))  # [h, C, V]
    dv_new = packed.apply_transposed(scores[:, :C], do, dtype, p) + written
    return dv_new, packed.apply_transposed(X, beta * dv_new, dtype, p)


def back_to_state(q, k, boundary, down, dS, dtype):
    """Return the gradient of the state before a chunk, [h, V, K]; `down` are do above -dR, [h, 2 C, V] operands."""
    from_start, _, through = boundary
    decayed = (packed.rows([q, k]) * tile.twice(from_start)).astype(matmul.operand_dtype(dtype))  # [h, 2 C, K]
    return through * dS + matmul.dot_tn(down, decayed)


def state_bwd_tile(q, k, beta, boundary, X, scores, do, dS, dtype):
    """Return the gradient of the state before a chunk alone, [h, V, K]; the arguments are those of `outer_bwd_tile`."""
    operand = matmul.operand_dtype(dtype)
    _, dR = back_to_values(k, beta, boundary, X, scores, do, dS, dtype)
    return back_to_state(q, k, boundary, packed.rows([do.astype(operand), (-dR).astype(operand)]), dS, dtype)


def outer_bwd_tile(q, k, beta, beta_row, boundary, kept, do, dS, same, dtype) -> Outer:
    """Return the gradients of a chunk but for what goes through the interaction of its keys.

    Args:
      q, k: [h, C, K] float32, q scaled.
      beta: [h, C, 1], and packed: beta_row [n, 1, p C].
      boundary: of `tile.boundary_tile`.
      kept: what the forward kept: S [h, V, K] before the step, W [h, C, V], packed X [n, C, p C] and scores
        [n, 2 C, p C].
      do: [h, C, V], gradient of the output, in the type of the tensors.
      dS: [h, V, K] float32, gradient of the state after the chunk.
      same: [1, C, C], rows of one sequence, or None.
      dtype: of the operands of the products.
    """
    S, W, X, scores = kept
    C, p, operand = k.shape[1], k.shape[0] // X.shape[0], matmul.operand_dtype(dtype)
    from_start, to_end, through = boundary
    dv_new, dR = back_to_values(k, beta, boundary, X, scores, do, dS, dtype)
    down = packed.rows([do.astype(operand), (-dR).astype(operand)])  # [h, 2 C, V]
    outers = packed.outer(down, W, dtype, p)  # [n, 2 C, p C]
    i, j = (lax.broadcasted_iota(jnp.int32, (1, 2 * C, p * C), axis) & (C - 1) for axis in (1, 2))
    pairs = i > j if same is None else (i > j) & tile.packed_pairs(same, p)  # [1, 2 C, p C]
    d_scores = jnp.where(pairs, outers, 0.0)  # [n, 2 C, p C]
    return Outer(
        dv=dR,
        d_scores=d_scores * beta_row,
        d_start=matmul.dot(down, S.astype(operand)) * tile.twice(from_start),
        d_end=matmul.dot((beta * W).astype(operand), dS.astype(operand)) * to_end,
        d_itself=beta * jnp.sum(do.astype(jnp.float32) * W, axis=-1, keepdims=True),
        later=through * jnp.sum(S.astype(jnp.float32) * dS, axis=1, keepdims=True),
        beta=(
            jnp.sum(dv_new * W, axis=-1, keepdims=True),
            jnp.sum(d_scores[:, C:] * scores[:, C:], axis=1, keepdims=True),
        ),
        S=back_to_state(q, k, boundary, down, dS, dtype),
    )


def chunk_bwd_tile(q, k, d_rows, d_columns, x: Outer):
    """Return the gradients of the scaled queries and the keys [h, C, K], and of what their gates get (later, earlier).

    All gates see the state pass through, each row's gates the pairs below it, and what runs to the end the gates after
    it. `later` [h, C, K] is what a row passes to its own and all earlier gates, `earlier` what it passes to all later
    ones: sums of one kind only, because differences of cumulative ones would cancel where gates are strong.
    """
    C = k.shape[1]
    d_rows = d_rows + x.d_start  # [h, 2 C, K]
    last = lax.broadcasted_iota(jnp.int32, (1, C, 1), 1) == C - 1
    later = q * d_rows[:, :C] + k * (d_rows[:, C:] - d_columns) + jnp.where(last, x.later, 0.0)  # [h, C, K]
    dq, dk = d_rows[:, :C] + x.d_itself * k, d_rows[:, C:] + d_columns + x.d_end + x.d_itself * q
    return dq, dk, later, k * x.d_end


def sum_over_rows(later, earlier, same, dtype):
    """Return the gradient of the gates, [C, heads K], from that of `chunk_bwd_tile`: a product with zeros and ones.

    What the rows of one sequence pass to the gates of another adds up to zero, but for rounding: `same` leaves it out.
    """
    C, count = later.shape[1], 2 if matmul.operand_dtype(dtype) == jnp.bfloat16 else 3
    later, earlier = (jnp.concatenate(list(x), axis=1) for x in (later, earlier))  # [C, heads K]
    by_part = [*matmul.bf16_parts(later, count), *matmul.bf16_parts(earlier, count)]  # each [C, heads K]
    collect = [tiles.row_index(C) <= tiles.column_index(C)] * count + [
        tiles.row_index(C) > tiles.column_index(C)
    ] * count
    if same is not None:
        collect = [x & same for x in collect]
    collect = packed.lanes([x.astype(jnp.float32) for x in collect]).astype(jnp.bfloat16)  # [1, C, 2 count C]
    return matmul.dot(collect, jnp.concatenate(by_part)[None])[0]


def _bwd_kernel(refs, *, static: kernel.Static):
    """Take the gradient of the state back through a step; the last step comes first.

    If that of the initial state is wanted, its block holds it until another sequence begins.
    """
    if refs.dh0 is not None:
        refs.state = refs.dh0
    turn = pl.program_id(2)
    step = layout.Step(refs.table, pl.program_id(0) * static.steps + static.steps - 1 - turn)

    # The scratch is uninitialised at first, and no sequence may end with the last step.
    @pl.when((turn == 0) | (step.last == 1))
    def _():
        refs.state[...] = jnp.zeros_like(refs.state) if refs.dht is None else refs.dht[...]

    if refs.dlaw is not None:

        @pl.when(turn == 0)
        def _():
            layout.clear(refs.dlaw)

    def clear_others() -> None:
        """Make the rows zero that no piece owns."""
        results = refs.dq, refs.dk, refs.dv, refs.dg, refs.dbeta
        pl.when((step.closes & step.mixed) == 1)(lambda: layout.clear(*results))

    turns = functools.partial(_turn, refs, step, static)
    if static.pieces:
        layout.whole_or_cut([step], static.C, turns, clear_others)
    else:
        nonfinite.masked_or_not(None if refs.owner is None else step.mixed == 1, turns)


def _turn(refs, step: layout.Step, static: kernel.Static, masked: bool | None) -> None:
    """Do as `_bwd_kernel`; `masked` as in the forward."""
    heads, dtype, C, K, V, p = static.config.heads_bwd, refs.do.dtype, static.C, static.K, static.V, static.p
    group = min(static.group, static.config.heads_bwd)
    own: Any = kernel.own_rows(step, static) if masked is None else None
    masks, spoilt = None, None
    goes_on = getattr(refs, "goes_on", None) if masked else None
    if masked:
        # As in the forward, which stored NaN as the W of spoilt sequences.
        masks = kernel.load_masks(refs.owner, step, C)
        kernel.store_continuing(goes_on, masks)
        valid = masks.code[0] >= 0
        spoilt = quarantine(refs, valid, masks, static)
        own = valid & (spoilt[0] == 0.0)
    chunk = kernel.load_chunk(refs, own, static)
    g = chunk.g if refs.law is None else kernel.decays_of(chunk.g, refs, own, static)
    # Without gradients of tokens no decay between two rows of the chunk is needed.
    base = 0 if refs.dq is None else static.backward_base
    kernel.store_block_decays(refs.decays, g, base, goes_on)
    q, k = (
        jnp.stack([x[n // group] for n in range(heads)]) for x in (chunk.q * static.scale, chunk.k)
    )  # [heads, C, K]
    do = layout.load_heads(refs.do, V, own=own)  # [heads, C, V]
    beta = tiles.to_column(chunk.beta[:, None])  # [heads, C, 1]
    same = None if masks is None else masks.same
    boundary = tile.boundary_tile(kernel.load_decays(refs.decays, range(heads), K, base), masks)
    if refs.dq is None:
        refs.state[...] = state_bwd_tile(
            q, k, beta, boundary, refs.X[...], refs.scores[...], do, refs.state[...], dtype
        )
        if masked:
            spoil_results(refs, spoilt, masks)
        return
    W = layout.load_heads(refs.W, V, own=own)  # [heads, C, V]
    kept = refs.h[...], W, refs.X[...], refs.scores[...]
    x = outer_bwd_tile(
        q, k, beta, packed.side_lanes(chunk.beta[:, None], p), boundary, kept, do, refs.state[...], same, dtype
    )
    refs.state[...] = x.S
    # Pieces share the rows of a chunk; what a chunk stores past the last token is never read.
    stored = own if static.pieces else None
    layout.store_heads(refs.dv, x.dv, stored)
    column, row = x.beta  # [heads, C, 1], [heads / p, 1, p C]
    by_head = [row[n // p, :, n % p * C : (n % p + 1) * C] for n in range(heads)]  # each [1, C]
    dbeta = tiles.to_row(column)[:, 0] + jnp.concatenate(by_head)  # [heads, C]
    refs.dbeta[...] = dbeta if stored is None else jnp.where(step.columns(C), dbeta, refs.dbeta[...])

    # The products of the levels, pack by pack.
    made = []
    for n in range(0, heads, p):
        pack, d_scores = slice(n, n + p), x.d_scores[n // p : n // p + 1]  # [1, 2 C, p C]
        decays = kernel.load_decays(refs.decays, range(n, n + p), K, base)
        made.append(interaction_bwd_tile(q[pack], k[pack], decays, refs.levels[...], d_scores, p, dtype))
    d_rows, d_columns = (jnp.concatenate(y) for y in zip(*made, strict=True))  # [heads, 2 C, K], [heads, C, K]
    dq, dk, later, earlier = chunk_bwd_tile(q, k, d_rows, d_columns, x)
    dg = sum_over_rows(later, earlier, same, dtype)  # [C, heads K]
    if refs.law is not None:
        dg = through_law(refs, own, dg, static)
    elif masked:  # padding counts to the sequence before it, and its gates to what passes through
        dg = jnp.where(own, dg, 0.0)
    layout.store_own(refs.dg, slice(None), dg, stored)
    for ref, source, d in ((refs.dq, refs.q, static.scale * dq), (refs.dk, refs.k, dk)):
        d = layout.sum_value_heads(d, group)  # [key heads, C, K]
        if static.normalise:
            d = tiles.l2norm_gradient(layout.load_heads(source, K, own=own), d)
        layout.store_heads(ref, d, stored)
    if masked:
        spoil_results(refs, spoilt, masks)


def through_law(refs, own, dg, static: kernel.Static):
    """Return the gradient of raw gates for that of decays, dg [C, heads K], and add to that of A_log and dt_bias."""
    A_log, dt_bias = refs.law[:1], refs.law[1:]  # [1, heads K]
    each = laws.decay_gradient(refs.g[...].astype(jnp.float32), A_log, dt_bias, static.lower_bound, dg)  # [C, heads K]
    # Raw gates of other rows may be anything, and zero times NaN is NaN.
    dx, dA = each if own is None else (jnp.where(own, x, 0.0) for x in each)
    refs.dlaw[...] += jnp.concatenate([jnp.sum(x, axis=0, keepdims=True) for x in (dA, dx)])
    return dx


def quarantine(refs, own, masks, static: kernel.Static) -> jax.Array:
    """Clear a gradient of the state that is not finite; return the rows of such sequences, float32 [1, C, 1]."""
    state = nonfinite.not_finite(refs.state[...])  # [1, 1, 1]

    @pl.when(jnp.max(state) > 0.0)
    def _():
        layout.clear(refs.state)

    found = nonfinite.rows_not_finite(
        *(layout.load_heads(ref, static.V, own=own) for ref in (refs.do, refs.W) if ref is not None)
    )
    if refs.W is None:  # in which the forward stored NaN where it found any
        found = jnp.maximum(found, kernel.keys_not_finite(refs, own, masks, static))  # [1, C, 1]
    return nonfinite.whole_sequences(jnp.maximum(found, jnp.where(masks.ending, state, 0.0)), masks.same)


def spoil_results(refs, spoilt, masks) -> None:
    """Store NaN in the gradients of spoilt rows, and as that of the state if it is of a spoilt sequence."""

    @pl.when(jnp.max(spoilt) > 0.0)
    def _():
        rows_of_tokens = jnp.where(masks.code >= 0, spoilt, 0.0)  # [1, C, 1]
        for ref in (refs.dq, refs.dk, refs.dv, refs.dg):
            if ref is not None:
                nonfinite.spoil(ref, rows_of_tokens)
        if refs.dbeta is not None:
            refs.dbeta[...] = jnp.where(tiles.to_row(rows_of_tokens)[0] > 0.0, jnp.nan, refs.dbeta[...])
        if refs.dlaw is not None:
            refs.dlaw[...] = jnp.full(refs.dlaw.shape, jnp.nan, jnp.float32)

        @pl.when(jnp.max(jnp.where(masks.carried, spoilt, 0.0)) > 0.0)
        def _():
            refs.state[...] = jnp.full(refs.state.shape, jnp.nan, jnp.float32)


# The gradients of what has tokens, and of the law.
ALL = ("dq", "dk", "dv", "dg", "dbeta", "dlaw")


def launch(x: Operands, static: kernel.Static, want: tuple[str, ...]) -> dict[str, Any]:
    """Run the backward.

    Args:
      x: what the kernel reads.
      static: what is known when it is built.
      want: ALL, ALL and "dh0", or "dh0" alone.

    Returns:
      A dict of the gradients wanted: dq, dk, dv, dg, dbeta, dlaw in the shapes of their inputs, dbeta float32, dlaw
      None if there is no law, and dh0 [N, HV, V, K] float32, of the initial states.
    """
    B, HV, C, K, V, steps, heads = (
        static.B, static.HV, static.C, static.K, static.V, static.steps, static.config.heads_bwd
    )  # fmt: skip
    p, keys, blocks = static.p, static.key_heads(heads), HV // heads
    cut = layout.Blocks(C, steps, lambda turn: steps - 1 - turn, static.pieces)
    key, share = cut.tokens(keys * K, max(static.group // heads, 1)), blocks * keys // static.H
    beta = x.beta.reshape(B, -1, blocks, heads, C)
    # A block of heads inside a group of value heads gives a partial sum of the group, in lanes of its own.
    d_keys = cut.tokens(keys * K), (*x.q.shape[:2], blocks * keys * K), x.q.dtype if share == 1 else jnp.float32
    packed_shape, base = (heads // p, C, p * C), static.backward_base if "dq" in want else 0
    operands = {
        "levels": (jnp.asarray(pair_table(C, base)) if base else None, kernel.whole_block(2 * C, C)),
        "q": (x.q, key),
        "k": (x.k, key),
        "g": (x.g, cut.tokens(heads * K)),
        "beta": (beta, cut.rows(heads)),
        "owner": (x.owner, cut.owner(C)),
        "h": (x.h, cut.per_step(heads, V, K)),
        "W": (x.W, cut.tokens(heads * V)),
        "X": (x.X, cut.per_step(*packed_shape)),
        "scores": (x.scores, cut.per_step(heads // p, 2 * C, p * C)),
        "do": (x.do, cut.tokens(heads * V)),
        "dht": (x.dht, cut.state(heads, V, K)),
        "law": (x.law, kernel.law_block(heads * K)),
    }
    outputs = {
        "dq": d_keys,
        "dk": d_keys,
        "dv": (cut.tokens(heads * V), x.do.shape, x.do.dtype),
        "dg": (cut.tokens(heads * K), x.g.shape, x.g.dtype),
        "dbeta": (cut.rows(heads), beta.shape, jnp.float32),
        "dh0": (cut.state(heads, V, K), (static.N, HV, V, K), jnp.float32),
        # A sum for every row of the batch, whose steps add to it.
        "dlaw": (pl.BlockSpec((None, 2, heads * K), lambda b, h, *_: (b, 0, h)), (B, 2, HV * K), jnp.float32),
    }
    wanted = [name for name in outputs if name in want and (name != "dlaw" or x.law is not None)]
    scratch = {"decays": kernel.decays_scratch(heads, C, K, base)}
    if "dh0" not in wanted:  # else that output holds the gradient of the state
        scratch["state"] = pltpu.VMEM((heads, V, K), jnp.float32)
    if x.owner is not None and base > 1:
        scratch["goes_on"] = pltpu.VMEM((C, packed.LANES), jnp.float32)
    results = launcher.pallas_call(
        launcher.named(
            _bwd_kernel, ["table", *operands], [(name, name in wanted) for name in outputs], list(scratch),
            static=static,
        ),
        x.table,
        *(value for value, _ in operands.values()),
        name=f"chunk_kda_{'bwd' if 'dq' in want else 'bwd_state'}_c{C}",
        num_scalar_prefetch=1,
        # Rows of the batch and blocks of heads are independent; the state's gradient passes from step to step in
        # scratch, the last step first.
        grid=(B, blocks, steps),
        dimension_semantics=("parallel", "parallel", "arbitrary"),
        in_specs=[None if value is None else spec for value, spec in operands.values()],
        out_specs=[outputs[name][0] for name in wanted],
        out_shape=[compat.out_struct(*outputs[name][1:], *x) for name in wanted],
        scratch_shapes=list(scratch.values()),
        in_bounds=True,
        cost_estimate=cost.cost(
            B=B, T=static.T, H=static.H, HV=HV, K=K, V=V, C=C, itemsize=x.q.dtype.itemsize, backward=True
        ),
    )  # fmt: skip
    gradients = dict(zip(wanted, results, strict=True))
    if "dq" not in want:
        return gradients
    gradients["dbeta"] = gradients["dbeta"].reshape(x.beta.shape)
    gradients["dlaw"] = jnp.sum(gradients["dlaw"], axis=0) if x.law is not None else None
    if share > 1:
        for name in ("dq", "dk"):
            d = gradients[name].reshape(*x.q.shape[:2], static.H, share, K)
            gradients[name] = jnp.sum(d, axis=3).reshape(x.q.shape).astype(x.q.dtype)
    return gradients
