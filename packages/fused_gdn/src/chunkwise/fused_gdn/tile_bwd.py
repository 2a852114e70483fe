"""The tile mathematics of the backward: arrays in, arrays out.

With the names of kernel.py, and dS' the gradient of the state after the chunk:

    dv_new = (scale tril(Q K^T * D))^T dO + e^(G_last - G) K dS'      dR = A_inv^T B dv_new      dV = dR
    dA = -tril(dR U^T, -1)                    dP = tril(dO (B U)^T)    of A = K K^T * D and P = scale Q K^T * D
    dS = e^G_last dS' + Q^T (scale e^G dO) - K^T (e^G dR)

dA needs no further product with A_inv: -A_inv^T (B dv_new R^T) A_inv^T = -dR U^T. As in the forward, with bfloat16
tensors the arrays that oscillate where keys repeat (U, dv_new, dR, P and the gradients of A and P) keep 16 bits, while
S and dS are rounded to 8 bits in products.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax

from chunkwise.fused_gdn import tile
from chunkwise.shared.kernels import matmul, packed, tiles
from chunkwise.shared.kernels.spans import layout, schedule


def lane_sums(x: jax.Array, w: int, dtype) -> jax.Array:
    """Return the sums of x [n, C, m w] over every w lanes, as [C, n m].

    It is a product with zeros and ones, because the matrix unit has time, and the unit that adds up lanes has none.
    """
    heads, tiles = x.shape[0] * x.shape[2] // w, [x[i : i + 1] for i in range(x.shape[0])]
    if x.shape[2] == w:  # a head takes whole registers
        tiles, w = [packed.whole(y) for y in tiles], packed.pad_lanes(w)
    flat = packed.split_bf16(packed.concat_lanes(tiles), dtype)
    lane, head = (lax.broadcasted_iota(jnp.int32, (1, heads * w, heads), axis) for axis in (1, 2))
    ones = tile.indicator(packed.block_of(lane, w) == head).astype(flat[0].dtype)  # [1, heads w, heads]
    sums = matmul.dot(packed.concat_rows(flat), ones)[0]  # [parts C, heads]
    return functools.reduce(jnp.add, [sums[i * x.shape[1] : (i + 1) * x.shape[1]] for i in range(len(flat))])


def row_sums(x: jax.Array, s: tile.Heads) -> jax.Array:
    """Return the sums over the rows of packed x [n, C, p C], as [C, heads]."""
    total = jnp.sum(x, axis=1, keepdims=True)
    head = packed.block_of(packed.lane_index(s.p * s.C)[0], s.C)
    per_head = [jnp.where(head == i, total[n], 0.0) for n in range(x.shape[0]) for i in range(s.p)]  # [1, p C] each
    i, j = tile.packed_index(s)
    return matmul.dot_nt(tile.indicator(i == j), jnp.concatenate(per_head)[None])[0]


def crossing_pairs(pairs: jax.Array, s: tile.Heads, dtype) -> jax.Array:
    """Return the sums of packed pairs (i, j) over i >= t for columns j < t, packed; t is the row.

    Summed over its columns, a row is the sum over all pairs i >= t > j, whose decay has the gate t.

    As a sum over all pairs with i >= t, less a sum over all pairs with j >= t, the pairs after a gate would cancel but
    for rounding, which may be far more than the gradient of the gate.
    """
    parts = matmul.bf16_parts(pairs, 2 if matmul.operand_dtype(dtype) == jnp.bfloat16 else 3)  # each [n, C, p C]
    from_t = tile.indicator(tiles.row_index(s.C) <= tiles.column_index(s.C)).astype(jnp.bfloat16)  # [1, C, C]
    from_t = jnp.concatenate([packed.concat_lanes([from_t] * len(parts))] * pairs.shape[0])  # [n, C, parts C]
    sums = matmul.dot(from_t, packed.concat_rows(parts))  # [n, C, p C]
    return jnp.where(strictly(s), sums, 0.0)


def fold(row: jax.Array, width: int) -> jax.Array:
    """Return rows [heads, 1, w] as rows [heads, 1, width] with the same sum."""
    each = min(width, packed.LANES)
    row = packed.whole(row, size=each)
    folded = functools.reduce(jnp.add, [row[:, :, i : i + each] for i in range(0, row.shape[2], each)])
    return packed.whole(folded, size=width)


def strictly(s: tile.Heads) -> jax.Array:
    """Return i > j of shape [1, C, p C]."""
    i, j = tile.packed_index(s)
    return i > j


def multiply_nt(a, b, dtype):
    """Return a b^T of float32 tiles as one pass of operands of `dtype`."""
    return matmul.dot_nt(a.astype(dtype), b.astype(dtype))


def key_gradients(A1, A2, q, k, s: tile.Heads):
    """Return the gradients of (q, k) [key heads, C, K] through the packed scores.

    dq = A2 K and dk = (A1 + A1^T) K + A2^T Q, summed over the value heads of a key head.
    """
    q_packs, k_packs, each = tile.key_packs(q, s), tile.key_packs(k, s), s.p // s.keys
    lanes = packed.pad_lanes(s.K)  # of a key head of several
    A = packed.split_bf16(packed.concat_rows([A1, A2]), k.dtype)  # [n, 2 C, p C] each
    direct = matmul.dot(
        packed.concat_lanes(A), packed.concat_rows([tile.placed_keys(k_packs, s)] * len(A))
    )  # [n, 2 C, lanes of its keys]
    transposed = matmul.dot_tn(
        packed.concat_rows(A), packed.concat_rows([packed.beside(k_packs), packed.beside(q_packs)] * len(A))
    )  # [n, p C, lanes of its keys]
    dq, dk = [0.0] * k.shape[0], [0.0] * k.shape[0]
    for n in range(s.heads // s.p):
        for j in range(s.keys):
            head, at = (n * s.p + j * each) // s.group, slice(j * lanes, j * lanes + s.K)
            dq[head] += direct[n, s.C :, at]
            dk[head] += direct[n, : s.C, at]
            for i in range(j * each, (j + 1) * each):
                dk[head] += transposed[n, i * s.C : (i + 1) * s.C, at]
    return jnp.stack(dq), jnp.stack(dk)


def back_to_values(k, QK, D, A_inv, do, dS, scale, end, beta, s: tile.Heads):
    """Return gradients of the values of a chunk, [heads, C, V] each, for which neither state nor values are needed.

    It is a generator that yields where a product waits for others.

    Args:
      k: [key heads, C, K].
      QK, D: scores and decays, packed [n, C, p C].
      A_inv: packed [n, C, p C].
      do: [heads, C, V].
      dS: float32 [heads, K, V], gradient of the state after the chunk.
      scale: multiplies q.
      end, beta: the decay to the end and the step sizes, over all lanes [heads, C, V].
      s: the heads.

    Returns:
      The gradient of the new values through the state after the chunk, their whole gradient dv_new, and the gradient of
      the values, dR.
    """
    written = end * tile.read_state(k, None, dS.astype(k.dtype), s)[0]
    dv_new = packed.apply_transposed(QK * (D * scale), do, k.dtype, s.p) + written
    yield
    return written, dv_new, packed.apply_transposed(A_inv, beta * dv_new, k.dtype, s.p)


def back_to_state(q, k, do, dR, dS, scale, start, s: tile.Heads):
    """Return the gradient of the state before a chunk, [heads, K, V]; the arguments are as in `back_to_values`."""
    read, parts = (scale * start) * do.astype(jnp.float32), packed.split_bf16(-start * dR, k.dtype)
    entering = packed.concat_rows([read.astype(k.dtype), *parts])  # [heads, 3 C, V], or [heads, 2 C, V] of float32
    product = matmul.dot_tn(packed.concat_rows([q, *[k] * len(parts)]), packed.side_registers(entering, s.group))
    return start[:, -1:] * dS + packed.split_lanes(product, s.group, s.V)


def state_gradient(q, k, gate, boundary, A_inv, do, dS, scale, s: tile.Heads):
    """Return only the gradient of the state before a chunk; the arguments are as in `chunk_gradients`."""
    pairs, *decays = boundary
    start, end, beta = (tile.head_columns(x, s, s.V) for x in (*decays, gate.beta))  # [heads, C, V]
    QK, D = tile.scores([q], k, gate, pairs, s)  # [n, C, p C]
    *_, dR = schedule.finish(back_to_values(k, QK, D, A_inv, do, dS, scale, end, beta, s))
    return back_to_state(q, k, do, dR, dS, scale, start, s)


def chunk_gradients(q, k, gate, boundary, A_inv, S, v_new_over_beta, do, dS, scale, s: tile.Heads):
    """Return the gradients of one chunk; a generator that yields where products wait for others.

    Args:
      q, k: [key heads, C, K].
      gate, boundary: the results of `tile.pack_gates` and `tile.boundary_decays` for the chunk.
      A_inv: packed [n, C, p C].
      S: the state before the chunk [heads, K, V], in the type of operands.
      v_new_over_beta: [heads, C, V] float32.
      do: [heads, C, V].
      dS: float32 [heads, K, V], gradient of the state after the chunk.
      scale: multiplies q.
      s: the heads.

    Returns:
      The results of `token_gradients`, and the gradient of the state before the chunk.
    """
    pairs, *decays = boundary
    # Factors of rows, repeated in all lanes, for tiles [heads, C, V].
    start, end, beta = (tile.head_columns(x, s, s.V) for x in (*decays, gate.beta))
    scores = _, QK, D = tile.scores([k, q], k, gate, pairs, s)  # [n, C, p C] each
    # The gradients of the new values, through the outputs of the chunk and through the state after it.
    of_values = yield from back_to_values(k, QK, D, A_inv, do, dS, scale, end, beta, s)
    gradients = yield from token_gradients(q, k, gate, decays, scores, S, v_new_over_beta, do, dS, of_values, scale, s)
    return *gradients, back_to_state(q, k, do, of_values[-1], dS, scale, start, s)


def token_gradients(q, k, gate, decays, scores, S, v_new_over_beta, do, dS, of_values, scale, s: tile.Heads):
    """Return the gradients of the tokens of one chunk; a generator that yields where products wait for others.

    Args:
      decays: packed columns [n, C, p C] from the start of the chunk, and to its end.
      scores: K K^T, Q K^T and the decays between rows, packed [n, C, p C].
      of_values: the result of `back_to_values`.

    The other arguments are as in `chunk_gradients`.

    Returns:
      dq, dk [key heads, C, K] and dv [heads, C, V]; as [C, heads] the terms of a row, through the states, in the
      gradients of its gate and all earlier gates, its terms in the gradients of all later gates, the gradients of gates
      through pairs of rows, and dbeta.
    """
    dtype, C = k.dtype, s.C
    (KK, QK, D), (written, dv_new, dR) = scores, of_values
    q_heads, k_heads = (jnp.stack([x[i // s.group] for i in range(s.heads)]) for x in (q, k))  # [heads, C, K]
    # Factors of rows, repeated in all lanes, for tiles [heads, C, K].
    start_k, end_k, beta_k = (tile.head_columns(x, s, s.K) for x in (*decays, gate.beta))
    beta = tile.head_columns(gate.beta, s, s.V)

    # From the gradients of the values, the gradients of the scores. Queries and keys also multiply the state before the
    # chunk, and keys make the state after it.
    outers = packed.outer(
        packed.concat_rows([dR, do.astype(jnp.float32)]), v_new_over_beta, dtype, s.p
    )  # [n, 2 C, p C]
    through_state = multiply_nt(packed.concat_rows([do.astype(jnp.float32), dR]), S, dtype)  # [heads, 2 C, K]
    into_state = multiply_nt(v_new_over_beta, dS, dtype)  # [heads, C, K]
    yield

    dA = jnp.where(strictly(s), -outers[:, :C], 0.0) * D  # [n, C, p C]
    A1, A2 = dA * gate.beta_rows, outers[:, C:] * (D * gate.beta_rows * scale)  # [n, C, p C]
    # Through the scores, the gradients of queries and keys.
    dq, dk = key_gradients(A1, A2, q, k, s)  # [key heads, C, K]
    dq_start, dk_start = (scale * start_k) * through_state[:, :C], -start_k * through_state[:, C:]  # [heads, C, K]
    dk_end = (end_k * beta_k) * into_state
    crossing = crossing_pairs(jnp.where(strictly(s), A1 * KK + A2 * QK, 0.0), s, dtype)
    # One sum is for the gate of a row and all earlier gates, the other for all later gates. The product of a row with
    # itself has no gate and is in neither sum. If it were added and subtracted again, its rounding would swamp the
    # gradients of strong gates.
    passes = fold(jnp.sum(S.astype(jnp.float32) * dS, axis=1, keepdims=True), s.K)  # [heads, 1, K]
    is_last = lax.broadcasted_iota(jnp.int32, (1, C, 1), 1) == C - 1
    entered = q_heads.astype(jnp.float32) * dq_start + k_heads.astype(jnp.float32) * dk_start  # [heads, C, K]
    later = lane_sums(entered + jnp.where(is_last, start_k[:, -1:] * passes, 0.0), s.K, dtype)
    earlier = lane_sums(beta * written * v_new_over_beta, s.V, dtype)
    dbeta = lane_sums(dv_new * v_new_over_beta, s.V, dtype) + row_sums(dA * KK, s)
    dq, dk = dq + layout.sum_value_heads(dq_start, s.group), dk + layout.sum_value_heads(dk_start + dk_end, s.group)
    yield
    return dq, dk, dR, later, earlier, lane_sums(crossing, C, dtype), dbeta
