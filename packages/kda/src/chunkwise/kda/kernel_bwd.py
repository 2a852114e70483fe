"""The backward of Kimi delta attention in one launch, chunks in reverse: tile mathematics, kernel body, launcher."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from chunkwise.kda import tile
from chunkwise.kda.kernel import (
    Chunk,
    Operands,
    Static,
    load_chunk,
    own_heads,
    put_heads,
    specs,
    sums_matrix,
    take_heads,
)
from chunkwise.shared import column_index, dot, dot_nt, dot_tn, out_struct, pallas_call, row_index, strictly_lower


class Gradients(NamedTuple):
    """Gradients of a chunk's tiles, all of the value heads.

    Attributes:
      q, k: [h, C, K] of the scaled queries and of the keys.
      v: [h, C, V].
      later: [h, C, K], what a row passes to its own and all earlier gates.
      earlier: [h, C, K], what a row passes to all later gates.
      beta: [h, C, 1].
      S: [h, V, K], of the state before the chunk.
    """

    q: jax.Array
    k: jax.Array
    v: jax.Array
    later: jax.Array
    earlier: jax.Array
    beta: jax.Array
    S: jax.Array


def interaction_bwd_tile(rows, k, levels, base, dP, dN, dtype):
    """Return the gradients of `interaction_tile` of rows [h, 2 C, K] and of k as columns [h, C, K].

    Only of pairs i > j: the diagonal has no gate, and a gate's gradient would be the difference of its two equal parts.
    """
    C = k.shape[1]
    d_scores = jnp.concatenate([dP, dN], axis=1)
    transposed = jnp.swapaxes(d_scores, 1, 2)
    d_rows, d_columns = jnp.zeros_like(rows), jnp.zeros_like(k)

    def add(d, d_columns, d_transposed, e_row, e_column):
        """Add to d_columns; return it and the gradient of the rows that d [h, R, C] holds."""
        d_columns += e_column * dot(d_transposed, rows * tile.twice(e_row), dtype)
        return tile.fine_dot(d, k * e_column, dtype), d_columns

    # Row indices of the pairs in both arrays: queries' and keys' rows follow one another.
    i, j = (lax.broadcasted_iota(jnp.int32, (1, 2 * C, C), axis) & (C - 1) for axis in (1, 2))
    j_T, i_T = (lax.broadcasted_iota(jnp.int32, (1, C, 2 * C), axis) & (C - 1) for axis in (1, 2))
    if base > 1:
        e_row, e_column = (jnp.exp2(sign * tile.middle_exponent(levels, base)) for sign in (1.0, -1.0))
        d = jnp.where(((i ^ j) < base) & (i > j), d_scores, 0.0)
        d_T = jnp.where(((i_T ^ j_T) < base) & (i_T > j_T), transposed, 0.0)
        d, d_columns = add(d, d_columns, d_T, e_row, e_column)
        d_rows += tile.twice(e_row) * d
    for level in range(base.bit_length() - 1, len(levels)):
        b, e = 1 << level, jnp.exp2(levels[level])
        d = jnp.where(tile.level_pairs(i, j, b), d_scores, 0.0)
        d_T = jnp.where(tile.level_pairs(i_T, j_T, b), transposed, 0.0)
        if b < tile.SUBLANES:
            d, d_columns = add(d, d_columns, d_T, e, e)
            d_rows += tile.twice(e) * d
        else:  # only right halves have pairs as rows
            d, d_columns = add(tile.halves(d, b)[1], d_columns, d_T, e, e)
            left, right = tile.halves(d_rows, b)
            d_rows = tile.join_halves(left, right + tile.twice(tile.halves(e, b)[1]) * d, b)
    return d_rows, d_columns


def chunk_bwd_tile(x: Chunk, S, dS, do, base, dtype) -> Gradients:
    """Return the gradients of a chunk.

    Args:
      x: the chunk.
      S: [h, V, K], the state before it.
      dS: [h, V, K], gradient of the state after it.
      do: [h, C, V], gradient of the output.
      base: rows of the diagonal blocks that one product covers.
      dtype: of the operands of the products.
    """
    C = x.k.shape[1]
    from_start, to_end, through = x.boundary
    rows = jnp.concatenate([x.q, x.k], axis=1)
    error = x.v - dot_nt(x.k * from_start, S, dtype)
    v_new = tile.fine_dot(x.X, x.beta * error, dtype)

    dv_new = tile.fine_dot(jnp.swapaxes(x.scores, 1, 2), do, dtype) + tile.fine_nt(x.k * to_end, dS, dtype)
    d_error = tile.fine_dot(jnp.swapaxes(x.X, 1, 2), dv_new, dtype)
    dP_dM = tile.fine_nt(jnp.concatenate([do, -d_error], axis=1), v_new, dtype)
    same = strictly_lower(C) if x.masks is None else strictly_lower(C) & x.masks.same
    dP, dM = (jnp.where(same, d, 0.0) for d in (dP_dM[:, :C], dP_dM[:, C:]))
    d_diagonal = jnp.sum(do * v_new, axis=-1, keepdims=True)
    d_beta = jnp.sum(dM * x.N, axis=-1, keepdims=True) + jnp.sum(d_error * error, axis=-1, keepdims=True)
    dv = x.beta * d_error

    down = jnp.concatenate([do, -dv], axis=1)
    d_boundary = dot(down, S, dtype) * tile.twice(from_start)
    d_end = dot(v_new, dS, dtype) * to_end
    d_rows, d_columns = interaction_bwd_tile(rows, x.k, x.sums.levels, base, dP, x.beta * dM, dtype)
    d_rows = d_rows + d_boundary
    # All gates see the state pass through, each row's gates the pairs below it, and what runs to the end the gates
    # after it. Sums of one kind only: differences of cumulative ones would cancel where gates are strong.
    passing = through * jnp.sum(S * dS, axis=1, keepdims=True)
    last = lax.broadcasted_iota(jnp.int32, x.k.shape, 1) == C - 1
    return Gradients(
        q=d_rows[:, :C] + d_diagonal * x.k,
        k=d_rows[:, C:] + d_columns + d_end + d_diagonal * x.q,
        v=dv,
        later=x.q * d_rows[:, :C] + x.k * (d_rows[:, C:] - d_columns) + jnp.where(last, passing, 0.0),
        earlier=x.k * d_end,
        beta=d_beta,
        S=through * dS + dot_tn(down, rows * tile.twice(from_start), dtype),
    )


def store_keys(d, x, own, normalise):
    """Return the gradient [C, own K] of the block x [C, own K] of queries or keys from that of the heads' tiles."""
    heads, C, K = d.shape
    d = jnp.sum(d.reshape(own, heads // own, C, K), axis=1)
    if normalise:
        x = take_heads(x.astype(jnp.float32), own)
        r = lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + 1e-6)
        d = r * (d - x * (r * r * jnp.sum(x * d, axis=-1, keepdims=True)))
    return put_heads(d)


def _kda_bwd_kernel(first_ref, sequence_ref, last_ref, opening_ref, matrix_ref, sum_ref, q_ref, k_ref, v_ref, g_ref,
                    beta_ref, owner_ref, h_ref, do_ref, dht_ref, dq_ref, dk_ref, dv_ref, dg_ref, dbeta_ref, dh0_ref,
                    dS_ref, *, static):  # fmt: skip
    del first_ref, sequence_ref  # read by the forward, and by the index maps
    heads, dtype = static.config.backward_heads, v_ref.dtype
    own, C, step = own_heads(heads, static), static.C, pl.program_id(1)
    chunk = pl.num_programs(1) - 1 - step

    @pl.when((step == 0) | (last_ref[chunk] == 1))
    def _():
        dS_ref[...] = jnp.zeros_like(dS_ref) if dht_ref is None else dht_ref[...]

    q, k = q_ref[...], k_ref[...]
    owner = None if owner_ref is None else owner_ref[...]
    x = load_chunk(
        matrix_ref[...], q, k, v_ref[...], g_ref[...], beta_ref[...], owner, opening_ref[chunk], static, heads
    )
    do = take_heads(do_ref[...].astype(jnp.float32), heads)
    if x.masks is not None:
        q, k = (jnp.where(x.masks.valid[0], y.astype(jnp.float32), 0.0) for y in (q, k))
        do = jnp.where(x.masks.valid, do, 0.0)
    d = chunk_bwd_tile(x, h_ref[...], dS_ref[...], do, static.base, dtype)
    dS_ref[...] = d.S
    if dh0_ref is not None:
        dh0_ref[...] = d.S
    dq_ref[...] = store_keys(static.scale * d.q, q, own, static.normalise).astype(dq_ref.dtype)
    dk_ref[...] = store_keys(d.k, k, own, static.normalise).astype(dk_ref.dtype)
    dv_ref[...] = put_heads(d.v).astype(dv_ref.dtype)
    # Sums over rows, exact in three bfloat16 parts.
    sums = jnp.concatenate([*tile.split3(put_heads(d.later)), *tile.split3(put_heads(d.earlier))], axis=0)
    dg_ref[...] = dot(sum_ref[...][None], sums[None], jnp.bfloat16)[0]
    diagonal = row_index(C) == column_index(C)
    dbeta_ref[...] = jnp.sum(jnp.where(diagonal, d.beta, 0.0), axis=1)


def launch(x: Operands, h: jax.Array, do: jax.Array, dht: jax.Array | None, static: Static):
    """Run the backward.

    Args:
      x: the operands of the forward.
      h: [NC, HV, V, K], the states before every chunk.
      do: [NC C, HV V].
      dht: [N, HV, V, K] float32, or None for zeros.
      static: what is known when the kernel is built.

    Returns:
      The gradients of q, k, v, g, beta and the initial state (None without one), in their shapes. That of a state whose
      sequence has no chunk is undefined.
    """
    NC, HV, C = x.beta.shape
    heads = static.config.backward_heads
    K, V, own, blocks = x.g.shape[1] // HV, x.v.shape[1] // HV, own_heads(heads, static), HV // heads
    spec = specs(static, heads, K, V, lambda n: NC - 1 - n)
    matrix = sums_matrix(C)
    ones = np.ones((C, C))
    collect = jnp.asarray(np.concatenate([np.triu(ones)] * 3 + [np.tril(ones, -1)] * 3, axis=1), jnp.bfloat16)
    key_type = x.q.dtype if blocks * own == static.H else jnp.float32

    def given(flag, value):
        return value if flag else None

    # A block of heads inside a group of value heads gives a partial sum of the group.
    d_key = pl.BlockSpec((C, own * K), lambda b, n, *tables: (NC - 1 - n, b))
    has_state = x.initial_state is not None
    dq, dk, dv, dg, dbeta, dh0 = pallas_call(
        functools.partial(_kda_bwd_kernel, static=static),
        *x[:4],
        matrix,
        collect,
        *x[4:8],
        x.beta.reshape(NC, blocks, heads, C),
        x.owner,
        h,
        do,
        dht,
        name=f"fused_chunk_kda_bwd_c{C}",
        num_scalar_prefetch=4,
        # Blocks of heads are independent; the state's gradient passes from chunk to chunk in scratch, in reverse order.
        grid=(blocks, NC),
        dimension_semantics=("parallel", "arbitrary"),
        in_specs=[
            pl.BlockSpec(matrix.shape, lambda b, n, *tables: (0, 0)),
            pl.BlockSpec(collect.shape, lambda b, n, *tables: (0, 0)),
            spec["key"],
            spec["key"],
            spec["value"],
            spec["gate"],
            spec["beta"],
            given(x.owner is not None, spec["owner"]),
            spec["boundary"],
            spec["value"],
            given(dht is not None, spec["state"]),
        ],
        out_specs=[d_key, d_key, spec["value"], spec["gate"], spec["beta"], given(has_state, spec["state"])],
        out_shape=[
            out_struct((NC * C, blocks * own * K), key_type, *x),
            out_struct((NC * C, blocks * own * K), key_type, *x),
            out_struct(x.v.shape, x.v.dtype, *x),
            out_struct(x.g.shape, jnp.float32, *x),
            out_struct((NC, blocks, heads, C), jnp.float32, *x),
            given(has_state, out_struct((static.N, HV, V, K), jnp.float32, *x)),
        ],
        scratch_shapes=[pltpu.VMEM((heads, V, K), jnp.float32)],
        cost_estimate=pl.CostEstimate(
            flops=2 * NC * HV * C * (6 * C * K * C.bit_length() + 6 * C * C + 8 * K * V + 6 * C * V),
            transcendentals=NC * HV * C * K * (C.bit_length() + 2),
            bytes_accessed=2 * sum(a.nbytes for a in x if a is not None) + h.nbytes + do.nbytes,
        ),
    )

    def group_sum(d):
        d = d.reshape(NC * C, static.H, -1, K)
        return jnp.sum(d, axis=2, dtype=jnp.float32).reshape(NC * C, -1).astype(x.q.dtype)

    dq, dk = (d if d.shape[1] == static.H * K else group_sum(d) for d in (dq, dk))
    return dq, dk, dv, dg, dbeta.reshape(x.beta.shape), dh0
