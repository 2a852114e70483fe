"""The backward of Kimi delta attention in one launch, chunks in reverse: tile mathematics, kernel body, launcher.

With the names of kernel.py, A = <Q, K>_D and N = tril(<K, K>_D, -1) without beta, Q scaled, and dS' arriving from the
right:

    dv_new = A^T dO + (K e^(G_last - G)) dS'      dR = X^T B dv_new      dV = dR
    dA = tril(dO W^T) B                           dN = -tril(dR W^T, -1) B
    dS = e^G_last dS' + (Q e^G)^T dO - (K e^G)^T dR

dA and dN go back through the products of every level, each with its own factors of rows and of columns. None is above
one, but with a bound on the gates those of base blocks: at most 2^96, and every pair of them multiplies to a decay.
X, W, A, N and S before every chunk are kept by the forward. As there, what oscillates where keys repeat (W, dv_new,
dA and dN) keeps 16 bits with bfloat16 tensors.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from chunkwise.kda import tile
from chunkwise.kda.kernel import (
    Operands,
    Static,
    decays_scratch,
    load_chunk,
    load_decays,
    own_heads,
    put_heads,
    specs,
    store_block_decays,
    take_heads,
)
from chunkwise.shared.compat import out_struct
from chunkwise.shared.kernels import (
    apply_transposed,
    bf16_parts,
    column_index,
    dot,
    dot_nt,
    dot_tn,
    l2norm_gradient,
    lanes,
    multiply_packed,
    named,
    operand_dtype,
    outer,
    pallas_call,
    parts,
    row_index,
    rows,
    side_lanes,
    to_column,
    to_row,
)


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
    operand = operand_dtype(dtype)
    both, turned = rows([q, k]), unpacked(d, p)
    pairs, pairs_turned = jnp.concatenate([table] * p, axis=1)[None], jnp.swapaxes(table, 0, 1)[None]
    split = [y.astype(jnp.float32) for y in parts(d, dtype)]
    d_rows, d_columns = jnp.zeros_like(both), jnp.zeros_like(k)
    for x in tile.level_factors(decays):
        if x.b is None:
            own, decayed, mine, left = k * x.columns, both * x.rows, split, turned
            here, here_turned = pairs == x.index, pairs_turned == x.index
        else:  # only right halves have pairs as rows, left halves as columns; the others meet zeros
            own = tile.halves(k, x.b)[0] * x.columns
            own = tile.join_halves(own, own, x.b)
            decayed = tile.halves(both, x.b)[1] * x.rows
            decayed = tile.join_halves(decayed, decayed, x.b)
            mine = [tile.halves(y, x.b)[1] for y in split]
            left = tile.halves(turned, x.b)[0]
            here, here_turned = tile.halves(pairs, x.b)[1] == x.index, tile.halves(pairs_turned, x.b)[0] == x.index
        mine = lanes([jnp.where(here, y, 0.0).astype(operand) for y in mine])
        add_rows = x.rows * multiply_packed(mine, own.astype(operand), p, dtype)
        turned_parts = parts(jnp.where(here_turned, left, 0.0), dtype)
        add_columns = x.columns * dot(lanes(turned_parts), rows([decayed.astype(operand)] * len(turned_parts)))
        if x.b is None:
            d_rows, d_columns = d_rows + add_rows, d_columns + add_columns
        else:
            untouched, right = tile.halves(d_rows, x.b)
            d_rows = tile.join_halves(untouched, right + add_rows, x.b)
            left, untouched = tile.halves(d_columns, x.b)
            d_columns = tile.join_halves(left + add_columns, untouched, x.b)
    return d_rows, d_columns


class Outer(NamedTuple):
    """The gradients that pass between the chunk's values, its scores and the state.

    Attributes:
      dv: [h, C, V], of the values, which is dR.
      d_scores: packed [n, 2 C, p C], of the scores of queries above those of keys, pairs i > j.
      d_start: [h, 2 C, K], of queries above keys, through the state before the chunk.
      d_end: [h, C, K], of keys, through the state after it.
      d_own: [h, C, 1], of the products of every query with its own key.
      later: [h, 1, K], what passes through the state to all gates.
      beta: [h, C, 1], and packed as rows [n, 1, p C]: their sum is the gradient.
      S: [h, V, K], of the state before the chunk.
    """

    dv: jax.Array
    d_scores: jax.Array
    d_start: jax.Array
    d_end: jax.Array
    d_own: jax.Array
    later: jax.Array
    beta: tuple[jax.Array, jax.Array]
    S: jax.Array


def outer_bwd_tile(q, k, beta, beta_row, boundary, kept, do, dS, same, dtype) -> Outer:
    """Return the gradients of a chunk but for what goes through the interaction of its keys.

    Args:
      q, k: [h, C, K] float32, q scaled.
      beta: [h, C, 1], and packed: beta_row [n, 1, p C].
      boundary: of `tile.boundary_tile`.
      kept: what the forward kept: S [h, V, K] before the chunk, W [h, C, V], packed X and scores.
      do: [h, C, V], gradient of the output, in the type of the tensors.
      dS: [h, V, K] float32, gradient of the state after the chunk.
      same: [1, C, C], rows of one sequence, or None.
      dtype: of the operands of the products.
    """
    S, W, X, scores = kept
    C, p, operand = k.shape[1], k.shape[0] // X.shape[0], operand_dtype(dtype)
    from_start, to_end, through = boundary
    dS_operand = dS.astype(operand)
    dv_new = apply_transposed(scores[:, :C], do, dtype, p) + dot_nt((k * to_end).astype(operand), dS_operand)
    dR = apply_transposed(X, beta * dv_new, dtype, p)
    down = rows([do.astype(operand), (-dR).astype(operand)])
    outers = outer(down, W, dtype, p)
    i, j = (lax.broadcasted_iota(jnp.int32, (1, 2 * C, p * C), axis) & (C - 1) for axis in (1, 2))
    pairs = i > j if same is None else (i > j) & tile.packed_pairs(same, p)
    d_scores = jnp.where(pairs, outers, 0.0)
    decayed = (rows([q, k]) * tile.twice(from_start)).astype(operand)
    return Outer(
        dv=dR,
        d_scores=d_scores * beta_row,
        d_start=dot(down, S.astype(operand)) * tile.twice(from_start),
        d_end=dot((beta * W).astype(operand), dS_operand) * to_end,
        d_own=beta * jnp.sum(do.astype(jnp.float32) * W, axis=-1, keepdims=True),
        later=through * jnp.sum(S.astype(jnp.float32) * dS, axis=1, keepdims=True),
        beta=(
            jnp.sum(dv_new * W, axis=-1, keepdims=True),
            jnp.sum(d_scores[:, C:] * scores[:, C:], axis=1, keepdims=True),
        ),
        S=through * dS + dot_tn(down, decayed),
    )


def chunk_bwd_tile(q, k, d_rows, d_columns, x: Outer):
    """Return the gradients of the scaled queries and the keys [h, C, K], and of what their gates get (later, earlier).

    All gates see the state pass through, each row's gates the pairs below it, and what runs to the end the gates after
    it. `later` [h, C, K] is what a row passes to its own and all earlier gates, `earlier` what it passes to all later
    ones: sums of one kind only, because differences of cumulative ones would cancel where gates are strong.
    """
    C = k.shape[1]
    d_rows = d_rows + x.d_start
    last = lax.broadcasted_iota(jnp.int32, (1, C, 1), 1) == C - 1
    later = q * d_rows[:, :C] + k * (d_rows[:, C:] - d_columns) + jnp.where(last, x.later, 0.0)
    dq, dk = d_rows[:, :C] + x.d_own * k, d_rows[:, C:] + d_columns + x.d_end + x.d_own * q
    return dq, dk, later, k * x.d_end


def sum_over_rows(later, earlier, same, dtype):
    """Return the gradient of the gates, [C, heads K], from that of `chunk_bwd_tile`: a product with zeros and ones.

    What the rows of one sequence pass to the gates of another adds up to zero, but for rounding: `same` leaves it out.
    """
    C, count = later.shape[1], 2 if operand_dtype(dtype) == jnp.bfloat16 else 3
    by_part = [*bf16_parts(put_heads(later), count), *bf16_parts(put_heads(earlier), count)]
    collect = [row_index(C) <= column_index(C)] * count + [row_index(C) > column_index(C)] * count
    if same is not None:
        collect = [x & same for x in collect]
    collect = lanes([jnp.where(x, 1.0, 0.0) for x in collect]).astype(jnp.bfloat16)
    return dot(collect, jnp.concatenate(by_part)[None])[0]


def _bwd_kernel(refs, *, static: Static, NC: int):
    heads, dtype, C, K, p = static.config.heads_bwd, refs.do.dtype, static.C, static.K, static.p
    own, step = own_heads(heads, static), pl.program_id(1)
    chunk = NC - 1 - step

    @pl.when((step == 0) | (refs.last[chunk] == 1))
    def _():
        refs.state[...] = jnp.zeros_like(refs.state) if refs.dht is None else refs.dht[...]

    q, k, g, beta_rows, masks = load_chunk(refs, chunk, static, own)
    store_block_decays(refs.decays, g, static.backward_base)
    q, k = (jnp.stack([x[n * own // heads] for n in range(heads)]) for x in (q * static.scale, k))
    do, W, beta = refs.do[...], take_heads(refs.W[...], heads), to_column(beta_rows[:, None])
    if masks is not None:
        do = jnp.where(masks.valid[0], do, jnp.zeros_like(do))
    same = None if masks is None else masks.same
    decays = load_decays(refs.decays, range(heads), K, static.backward_base)
    boundary = tile.boundary_tile(decays, masks)
    x = outer_bwd_tile(
        q, k, beta, side_lanes(beta_rows[:, None], p), boundary, (refs.h[...], W, refs.X[...], refs.both[...]),
        take_heads(do, heads), refs.state[...], same, dtype,
    )  # fmt: skip
    refs.state[...] = x.S
    if refs.dh0 is not None:
        refs.dh0[...] = x.S
    refs.dv[...] = put_heads(x.dv).astype(refs.dv.dtype)
    column, row = x.beta
    by_head = [row[n // p, :, n % p * C : (n % p + 1) * C] for n in range(heads)]
    refs.dbeta[...] = to_row(column)[:, 0] + jnp.concatenate(by_head)

    made = []
    for n in range(0, heads, p):
        at, d_scores = slice(n, n + p), x.d_scores[n // p : n // p + 1]
        decays = load_decays(refs.decays, range(n, n + p), K, static.backward_base)
        made.append(interaction_bwd_tile(q[at], k[at], decays, refs.table[...], d_scores, p, dtype))
    d_rows, d_columns = (jnp.concatenate(y) for y in zip(*made, strict=True))
    dq, dk, later, earlier = chunk_bwd_tile(q, k, d_rows, d_columns, x)
    refs.dg[...] = sum_over_rows(later, earlier, same, dtype)
    for ref, y, d in ((refs.dq, refs.q[...], static.scale * dq), (refs.dk, refs.k[...], dk)):
        # Summed over the value heads of a key head.
        d = jnp.sum(d.reshape(own, heads // own, C, K), axis=1)
        if static.normalise:
            y = y if masks is None else jnp.where(masks.valid[0], y, jnp.zeros_like(y))
            d = l2norm_gradient(take_heads(y, own), d)
        ref[...] = put_heads(d).astype(ref.dtype)


def launch(x: Operands, h, W, X, both, do: jax.Array, dht: jax.Array | None, static: Static):
    """Run the backward.

    Args:
      x: the operands of the forward.
      h, W, X, both: what it kept for the backward.
      do: [NC C, HV V].
      dht: [N, HV, V, K] float32, or None for zeros.
      static: what is known when the kernel is built.

    Returns:
      The gradients of q, k, v, g, beta and the initial state (None without one), in their shapes. That of a state whose
      sequence has no chunk is undefined.
    """
    NC, HV, C = x.beta.shape
    heads, K, V = static.config.heads_bwd, static.K, static.V
    own, blocks = own_heads(heads, static), HV // heads
    spec = specs(static, heads, lambda n: NC - 1 - n)
    key_type = x.q.dtype if blocks * own == static.H else jnp.float32
    # A block of heads inside a group of value heads gives a partial sum of the group.
    d_key = pl.BlockSpec((C, own * K), lambda b, n, *tables: (NC - 1 - n, b))
    d_keys = d_key, out_struct((NC * C, blocks * own * K), key_type, *x)
    operands = {
        "table": (jnp.asarray(pair_table(C, static.backward_base)), pl.BlockSpec((2 * C, C), lambda *_: (0, 0))),
        "q": (x.q, spec["key"]),
        "k": (x.k, spec["key"]),
        "g": (x.g, spec["gate"]),
        "beta": (x.beta.reshape(NC, blocks, heads, C), spec["beta"]),
        "owner": (x.owner, spec["owner"]),
        "h": (h, spec["boundary"]),
        "W": (W, spec["value"]),
        "X": (X, spec["packed"]),
        "both": (both, spec["both"]),
        "do": (do, spec["value"]),
        "dht": (dht, spec["state"]),
    }
    outputs = {
        "dq": d_keys,
        "dk": d_keys,
        "dv": (spec["value"], out_struct(x.v.shape, x.v.dtype, *x)),
        "dg": (spec["gate"], out_struct(x.g.shape, jnp.float32, *x)),
        "dbeta": (spec["beta"], out_struct((NC, blocks, heads, C), jnp.float32, *x)),
        "dh0": (spec["state"], out_struct((static.N, HV, V, K), jnp.float32, *x)),
    }
    wanted = [name for name in outputs if name != "dh0" or x.initial_state is not None]
    scratch = {
        "state": pltpu.VMEM((heads, V, K), jnp.float32),
        "decays": decays_scratch(heads, C, K, static.backward_base),
    }
    names = ["first", "sequence", "last", "opening", *operands]
    results = pallas_call(
        named(_bwd_kernel, names, [(name, name in wanted) for name in outputs], list(scratch), static=static, NC=NC),
        *x[:4],
        *(value for value, _ in operands.values()),
        name=f"fused_chunk_kda_bwd_c{C}",
        num_scalar_prefetch=4,
        # Blocks of heads are independent; the state's gradient passes from chunk to chunk in scratch, in reverse order.
        grid=(blocks, NC),
        dimension_semantics=("parallel", "arbitrary"),
        in_specs=[None if value is None else part for value, part in operands.values()],
        out_specs=[outputs[name][0] for name in wanted],
        out_shape=[outputs[name][1] for name in wanted],
        scratch_shapes=list(scratch.values()),
        cost_estimate=pl.CostEstimate(
            flops=2 * NC * HV * C * (6 * C * K * C.bit_length() + 6 * C * C + 8 * K * V + 6 * C * V),
            transcendentals=NC * HV * C * K * (C.bit_length() + 2),
            bytes_accessed=2 * sum(a.nbytes for a in x if a is not None) + h.nbytes + W.nbytes + X.nbytes + both.nbytes,
        ),
    )
    grads = dict(zip(wanted, results, strict=True))

    def group_sum(d):
        d = d.reshape(NC * C, static.H, -1, K)
        return jnp.sum(d, axis=2, dtype=jnp.float32).reshape(NC * C, -1).astype(x.q.dtype)

    dq, dk = (d if d.shape[1] == static.H * K else group_sum(d) for d in (grads["dq"], grads["dk"]))
    return dq, dk, grads["dv"], grads["dg"], grads["dbeta"].reshape(x.beta.shape), grads.get("dh0")
