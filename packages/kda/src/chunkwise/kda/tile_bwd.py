"""The tile mathematics of the backward of Kimi delta attention: arrays in, arrays out.

Tiles [h, C, K] may hold several heads, see shared.kernels.spans.lanes. States and their gradients are transposed,
[V, K]. With the names of kernel.py, P = <Q, K>_D and A = tril(<E, K>_D, -1)
without beta, Q scaled, and dS' the gradient of the state after the chunk:

    dv_new = P^T dO + (K e^(G_last - G)) dS'      dR = A_inv^T B dv_new      dV = dR
    dP = tril(dO U^T) B                           dA = -tril(dR U^T, -1) B
    dS = e^G_last dS' + (Q e^G)^T dO - (E e^G)^T dR

dP and dA go back through the products of every level, which have different factors of rows and of columns. No factor
exceeds one, except in base blocks, where a factor is at most 2^96 and the product of two is a decay. Where erase keys
read the state before the decay of their token, the pairs of neighbouring rows in dA have no decay: they go back without
these products, and give no gradient to a gate. The forward leaves A_inv, U, P, A and S before every span. As in the
forward, with bfloat16 tensors the arrays that oscillate where keys repeat (U, dv_new, dR, dP and dA) keep 16 bits.
"""

import jax.numpy as jnp
import numpy as np
from jax import lax

from chunkwise.kda import tile
from chunkwise.shared.kernels import matmul, packed, tiles
from chunkwise.shared.kernels.spans import lanes

LEFT, RIGHT = range(2)


def pair_table(C: int, base: int, erase_before_decay: bool) -> np.ndarray:
    """Return int32 [2 C, C], the product that has the pair of query i, then of erase key i, with key j < i.

    Erase keys that read the state before the decay of their token have no product for j = i - 1.
    """
    table = tile.level_table(C, base)[:, C:].T
    return np.concatenate([table, np.where(np.eye(C, k=-1), -1, table) if erase_before_decay else table])


def moved_up(x):
    """Return x [h, C, D] with every row in the place of the row before it, and zeros in the last row."""
    return jnp.where(_row_numbers(x) == x.shape[1] - 1, 0.0, packed.rotate(x, -1, axis=1))


def moved_down(x):
    """Return x [h, C, D] with every row in the place of the row after it, and zeros in the first row."""
    return jnp.where(_row_numbers(x) == 0, 0.0, packed.rotate(x, 1, axis=1))


def _row_numbers(x):
    """Return the numbers of the rows of x [h, C, D], int32 [1, C, 1]."""
    return lax.broadcasted_iota(jnp.int32, (1, x.shape[1], 1), 1)


def unpacked(x, p: int):
    """Return packed matrices [n, R, p C] transposed, [n p, C, R]."""
    transposed = jnp.concatenate([jnp.swapaxes(x[i], 0, 1) for i in range(x.shape[0])])
    return transposed.reshape(x.shape[0] * p, -1, x.shape[1])


def factors_beyond_base(exact: tile.ChannelDecays, decays: tile.ChannelDecays):
    """Yield the `tile.level_factors` of the levels inside base blocks, with zeros in rows that base blocks have.

    Args:
      exact: the decays without base blocks.
      decays: the decays with base blocks, whose factors are zero in rows that base blocks cannot have.
    """
    in_base = packed.concat_rows([x.base[0] for x in decays.readers])  # [h, 2 C, K]
    for index, b, by_column, by_row in tile.level_factors(exact):
        if b is None:
            yield index, b, by_column, jnp.where(in_base > 0.0, 0.0, by_row)


def interaction_bwd_tile(
    q, e, k, factors, table, d, p: int, dtype, by_level: bool, erase_before_decay: bool, keys: lanes.Lanes
):
    """Return the gradients through `tile.interaction_tile`.

    Only pairs i > j count. The diagonal has no gate; with it, a gate's gradient would have a term as a row and the
    same, negative, as a column.

    Args:
      q, e, k, dtype: as in `tile.interaction_tile`.
      factors: the results of `tile.level_factors`.
      table: `pair_table`.
      d: packed gradients [n, 2 C, p m C] of the scores of queries above the scores of keys.
      p: tiles of a pack.
      by_level: the result of `sums_by_level`.
      erase_before_decay: whether erase keys read the state before the decay of their token.
      keys: the lanes of tiles, of which each has m heads.

    Returns:
      The gradients of the rows [h, 2 C, K], and of k as columns [h, C, K]; and for the gates the terms of all pairs
      [h, C, K], a part of `later` in `chunk_bwd_tile`, or with `by_level` the gradients through pairs [C, h K].
      The other one is None.
    """
    operand, crossing, early = matmul.operand_dtype(dtype), [], erase_before_decay
    # A term has both factors as the products have them, rounded: so a pair has one term, as a row and as a column.
    rounded = lambda x: x.astype(operand).astype(jnp.float32)
    m = keys.heads
    stacked, transposed = packed.concat_rows([q, e]), unpacked(d, p)  # [h, 2 C, K], [h, m C, 2 C]
    pairs = jnp.concatenate([table] * (p * m), axis=1)[None]  # [1, 2 C, p m C]
    pairs_T = jnp.swapaxes(table, 0, 1)[None]  # [1, C, 2 C]
    pairs_T = pairs_T if m == 1 else packed.concat_rows([pairs_T] * m)  # [1, m C, 2 C]
    split = [y.astype(jnp.float32) for y in packed.split_bf16(d, dtype)]  # each [n, 2 C, p C]
    d_rows, d_columns = jnp.zeros_like(stacked), jnp.zeros_like(k)  # [h, 2 C, K], [h, C, K]
    terms = None if by_level else jnp.zeros_like(k)
    for index, b, by_column, by_row in factors:
        if b is None:  # all rows and columns take part, and the table selects pairs
            rows, columns = stacked * by_row, k * by_column  # [h, 2 C, K], [h, C, K]
            all_rows, all_columns = rows, columns
            of_rows, of_columns = split, transposed
            on_rows, on_columns = pairs == index, pairs_T == index
        else:  # only rows of right halves and columns of left halves have pairs; other rows and columns are zeros
            rows, columns = tile.halves(stacked, b)[1] * by_row, tile.halves(k, b)[0] * by_column  # [h, C or C / 2, K]
            all_rows, all_columns = tile.join_halves(rows, rows, b), tile.join_halves(columns, columns, b)
            of_rows = [tile.halves(y, b)[1] for y in split]  # each [n, C, p C]
            of_columns = tile.halves(transposed, b)[0]  # [h, m C / 2, 2 C]
            on_rows, on_columns = tile.halves(pairs, b)[1] == index, tile.halves(pairs_T, b)[0] == index
        # [n, 2 C or C, parts p C]
        of_rows = packed.concat_lanes([jnp.where(on_rows, y, 0.0).astype(operand) for y in of_rows])
        of_rows = packed.multiply_packed(of_rows, keys.below(all_columns.astype(operand)), p, dtype)  # [h, 2 C or C, K]
        column_parts = packed.split_bf16(jnp.where(on_columns, of_columns, 0.0), dtype)  # each [h, m C or m C / 2, 2 C]
        of_columns = matmul.dot(
            packed.concat_lanes(column_parts), packed.concat_rows([all_rows.astype(operand)] * len(column_parts))
        )
        of_columns = keys.beside(of_columns)  # [h, C or C / 2, K]
        d_rows = _add_to_half(d_rows, by_row * of_rows, b, RIGHT)
        d_columns = _add_to_half(d_columns, by_column * of_columns, b, LEFT)
        of_rows, of_columns = rounded(rows) * of_rows, rounded(columns) * of_columns
        if by_level:
            if b is not None:
                of_rows = tile.join_halves(jnp.zeros_like(of_rows), of_rows, b)  # [h, 2 C, K]
                of_columns = tile.join_halves(of_columns, jnp.zeros_like(of_columns), b)  # [h, C, K]
            crossing.append((_crossing(k.shape[1], index), _level_terms(of_rows, of_columns, index, early)))
        else:
            terms = _add_terms(terms, of_rows, of_columns, b, early)
    return d_rows, d_columns, terms, sum_over_rows(crossing, dtype) if by_level else None


def _add_to_half(x, y, b, half: int):
    """Return x [h, R, D] with y added to LEFT or RIGHT halves, as `tile.halves` has them; without a b to all rows."""
    if b is None:
        return x + y
    parts = list(tile.halves(x, b))
    parts[half] = parts[half] + y
    return tile.join_halves(*parts, b)


def _add_terms(terms, of_rows, of_columns, b, erase_before_decay: bool):
    """Return terms [h, C, K] plus the terms of the rows of a level, less the terms of its columns."""
    queries, erase = jnp.split(of_rows, 2, axis=1)  # each [h, C or C / 2, K]
    if erase_before_decay:  # the decays of a row of erase keys end with the gate of the row before
        terms, of_rows = terms + moved_up(_add_to_half(jnp.zeros_like(terms), erase, b, RIGHT)), queries
    else:
        of_rows = queries + erase
    if b is None:
        return terms + (of_rows - of_columns)
    left, right = tile.halves(terms, b)
    return tile.join_halves(left - of_columns, right + of_rows, b)


def sums_by_level(base: int, dtype) -> bool:
    """Return whether gates get their gradients level by level, from the pairs around them alone.

    As a sum over all pairs whose row is not before the gate, less a sum over all pairs whose column is not before it,
    the pairs after a gate cancel but for rounding. With the same factors on both sides this is the rounding of float32
    sums, which is far below that of bfloat16 tensors, and in float32 may exceed the gradient of a strong gate. The sums
    by level take more time, so they are for tensors whose products keep float32, and for gates without a bound.
    """
    return base == 1 and matmul.operand_dtype(dtype) == jnp.float32


def _level_terms(of_rows, of_columns, index: int, erase_before_decay: bool):
    """Return the terms of the pairs of a level in gradients of gates [h, C, K]: of rows right, of columns left.

    Args:
      of_rows: [h, 2 C, K], sums over the pairs of a row of queries, and of a row of erase keys; zero in left halves.
      of_columns: [h, C, K], sums over the pairs of a column, zero in right halves.
      index: the level has halves of 2^index rows.
      erase_before_decay: whether the decays of a row of erase keys end with the gate of the row before.
    """
    C = of_columns.shape[1]
    queries, erase = of_rows[:, :C], of_rows[:, C:]
    if erase_before_decay:  # the first row of a right half has no gate there
        erase = jnp.where((_row_numbers(erase) >> index) & 1 == 1, moved_up(erase), 0.0)
    return queries + erase + of_columns


def _crossing(C: int, index: int):
    """Return which rows' terms of a level are in the gradient of a gate, [1, C, C], gates by rows.

    A gate in a right half has the pairs of its row and later rows of this half, a gate in a left half the pairs of
    earlier columns of this half: these are the pairs around it.
    """
    gate, row = tiles.row_index(C), tiles.column_index(C)
    is_right = (gate >> index) & 1 == 1
    return ((gate >> index) == (row >> index)) & ((is_right & (row >= gate)) | (~is_right & (row < gate)))


def through_outputs(scores, do, dtype, values: lanes.Lanes):
    """Return the gradient of the new values through the outputs of a chunk, [h, C, V], for which no state is needed."""
    return apply_transposed(scores[:, : do.shape[1]], do, dtype, values)


def apply_transposed(X, x, dtype, values: lanes.Lanes):
    """Return X^T x of every head, [h, C, V], for packed X and tiles of values x [h, C, V]."""
    return values.beside(packed.apply_transposed(X, x, dtype, x.shape[0] // X.shape[0]))


def back_to_values(k, beta, boundary, A_inv, of_outputs, dS, dtype, keys: lanes.Lanes, values: lanes.Lanes):
    """Return gradients of the values of a chunk, [h, C, V] each, for which neither state nor values are needed.

    It is a generator that yields where a product waits for others.

    Args:
      k, beta, boundary, dS, dtype, keys, values: as in `outer_bwd_tile`.
      A_inv: packed [n, C, p C].
      of_outputs: the result of `through_outputs`.

    Returns:
      dv_new, the gradient of the new values, and dR, the gradient of the values.
    """
    operand = matmul.operand_dtype(dtype)
    _, to_end, _ = boundary
    written = (k * to_end).astype(operand)
    dv_new = of_outputs + matmul.dot_nt(written, keys.open_state(dS.astype(operand), values.size))  # [h, C, V]
    yield
    return dv_new, apply_transposed(A_inv, values.together(beta) * dv_new, dtype, values)


def back_to_state(q, e, boundary, do, dR, dS, dtype, keys: lanes.Lanes):
    """Return the gradient of the state before a chunk, for dS of the state after it; dR is from `back_to_values`."""
    (of_queries, of_erase_keys), _, through = boundary
    operand, parts = matmul.operand_dtype(dtype), packed.split_bf16(-dR, dtype)
    down = packed.concat_rows([do.astype(operand), *parts])  # [h, 3 C, V], or [h, 2 C, V] of float32
    q, e = ((x * decay).astype(operand) for x, decay in ((q, of_queries), (e, of_erase_keys)))
    dS = keys.cut(through) * dS
    return dS + keys.close_state(matmul.dot_tn(down, packed.concat_rows([q, *[e] * len(parts)])), dS.shape[1])


def outer_bwd_tile(
    k, beta, beta_row, boundary, residuals, do, of_values, dS, same, dtype, erase_before_decay, keys: lanes.Lanes,
    values: lanes.Lanes,
):  # fmt: skip
    """Return the gradients of the tokens of a chunk, except for the parts through scores of keys and queries.

    Args:
      k: [h, C, K] float32.
      beta, beta_row: step sizes of heads [m h, C, 1], and packed [n, 1, p C].
      boundary: the result of `tile.boundary_tile`.
      residuals: the residuals of the forward: S before the span, v_new_over_beta [h, C, V] and packed scores
        [n, 2 C, p C].
      do: [h, C, V], gradient of the output, in the type of the tensors.
      of_values: the results of `back_to_values`.
      dS: float32, gradient of the state after the chunk.
      same: [1, C, C], rows of one sequence, or None.
      dtype: the type of operands of products.
      erase_before_decay: whether erase keys read the state before the decay of their token.
      keys, values: the lanes of tiles, of which each has m heads.

    Returns:
      dbeta as the sum of [m h, C, 1] and packed rows [n, 1, p C]; the gradient of the scores of queries above keys,
      packed [n, 2 C, p C], pairs i > j; and for `chunk_bwd_tile` the gradients of queries above keys through the state
      before the chunk [h, 2 C, K], of keys through the state after it [h, C, K], of the products of queries with the
      keys of the same rows, of all gates through the state that passes [h, 1, K], and of the products of erase keys
      with the keys of the rows before, None where these have a decay. Both of products are [h, C, 1], or [h, C, K] of
      several heads.
    """
    (S, v_new_over_beta, scores), (dv_new, dR) = residuals, of_values
    C, p, operand = k.shape[1], scores.shape[2] // k.shape[1], matmul.operand_dtype(dtype)
    from_start, to_end, through = boundary
    down = packed.concat_rows([do.astype(operand), (-dR).astype(operand)])  # [h, 2 C, V]
    outers = packed.outer(down, values.below(v_new_over_beta), dtype, p // keys.heads)  # [n, 2 C, p C]
    i, j = (lax.broadcasted_iota(jnp.int32, (1, 2 * C, p * C), axis) & (C - 1) for axis in (1, 2))
    pairs = i > j if same is None else (i > j) & tile.packed_pairs(same, p)  # [1, 2 C, p C]
    d_scores = jnp.where(pairs, outers, 0.0)  # [n, 2 C, p C]
    v_new = values.together(beta) * v_new_over_beta
    opened = lambda x: keys.open_state(x.astype(operand), values.size)  # [h, V, K]
    of_state = (
        matmul.dot(down, opened(S)) * packed.concat_rows(from_start),
        matmul.dot(v_new.astype(operand), opened(dS)) * to_end,
        keys.together(beta * values.sums(do.astype(jnp.float32) * v_new_over_beta)),
        through * keys.pad(jnp.sum(S.astype(jnp.float32) * dS, axis=1, keepdims=True)),
        keys.together(_of_neighbours(dR, v_new, same, values)) if erase_before_decay else None,
    )
    dbeta = (
        values.sums(dv_new * v_new_over_beta),
        jnp.sum(d_scores[:, C:] * scores[:, C:], axis=1, keepdims=True),
    )
    return dbeta, d_scores * beta_row, of_state


def _of_neighbours(dR, v_new, same, values: lanes.Lanes):
    """Return the gradient of the products of erase keys with the keys of the rows before, of heads [m h, C, 1]."""
    found = -values.sums(dR * moved_down(v_new))
    return found if same is None else jnp.where(tile.continuing(same) == 0.0, 0.0, found)


def chunk_bwd_tile(q, e, k, d_rows, d_columns, of_state, terms):
    """Return the gradients of queries, erase keys and keys [h, C, K], and `later` and `earlier` for the gates.

    `later` [h, C, K] has the terms of a row in the gradients of its gate and all earlier gates, and `earlier` the terms
    of a row in the gradients of all later gates. The gradient of a gate is a sum of both, over later and over earlier
    rows; as a difference of cumulative sums it would cancel where gates are strong.

    Args:
      q, e, k: [h, C, K] float32, q scaled; e is None where k erases, whose gradient is then the sum for both.
      d_rows, d_columns: the results of `interaction_bwd_tile`.
      of_state: the last results of `outer_bwd_tile`.
      terms: the terms of pairs of rows in `later`, or None if `interaction_bwd_tile` gives the gates' gradients itself.
    """
    C, (d_start, d_end, d_itself, of_gates, of_neighbours) = k.shape[1], of_state
    last = _row_numbers(k) == C - 1
    dq, de, dk = d_rows[:, :C] + d_start[:, :C] + d_itself * k, d_rows[:, C:] + d_start[:, C:], d_columns + d_end
    dk = dk + d_itself * q
    later = q * d_start[:, :C] + jnp.where(last, of_gates, 0.0)
    if of_neighbours is None:
        later = later + (k if e is None else e) * d_start[:, C:]
    else:
        # The decays of a row of erase keys end with the gate of the row before.
        later = later + moved_up(e * d_start[:, C:])
        dk, de = dk + moved_up(of_neighbours * e), de + of_neighbours * moved_down(k)
    later = later if terms is None else later + terms
    return dq, de, (dk + de if e is None else dk), later, k * d_end


def sum_over_rows(terms, dtype):
    """Return sums over rows, [C, heads K], for a list of pairs of a mask [1, C, C] and of terms [heads, C, K].

    A row of a mask has the rows of the terms that are in its sum. The sums are a product with zeros and ones.
    """
    count = 2 if matmul.operand_dtype(dtype) == jnp.bfloat16 else 3
    collect = [x.astype(jnp.float32) for x, _ in terms for _ in range(count)]
    by_part = [part for _, x in terms for part in matmul.bf16_parts(jnp.concatenate(list(x), axis=1), count)]
    collect = packed.concat_lanes(collect).astype(jnp.bfloat16)  # [1, C, terms count C]
    return matmul.dot(collect, jnp.concatenate(by_part)[None])[0]


def gate_gradients(later, earlier, same, dtype):
    """Return the gradient of the gates, [C, heads K], from `later` and `earlier` of `chunk_bwd_tile`.

    Terms of one sequence in gradients of another sequence's gates would add up to zero, but for rounding; `same` leaves
    them out. `earlier` may be None.
    """
    gate, row = tiles.row_index(later.shape[1]), tiles.column_index(later.shape[1])
    masks = [x if same is None else x & same for x in (gate <= row, gate > row)]
    return sum_over_rows([x for x in zip(masks, (later, earlier), strict=True) if x[1] is not None], dtype)
