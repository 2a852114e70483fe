"""Tile mathematics of Kimi delta attention: arrays in, arrays out, shared by the kernels and the plain JAX form.

Tiles are [heads, C, D]; gates inside are to base 2, which is what the machine's exponential takes. Everything is
batched over heads, which run in lock-step and hide the latency of one another.

Pairs (i, j), i > j, of a chunk belong to the level b = 1, 2, ..., C/2 at which i is in the right and j in the left
half of one block of 2b rows. Between them lies the last row n of the left half, so their decay is the product of
e^(sum of g over (n, i]) and e^(sum of g over (j, n]): two exponents that are never positive. With these as factors of
the rows and of the columns a whole level is one matrix product, for any gate.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from chunkwise.shared import column_index, dot, dot_nt, dot_tn, last_valid, operand_dtype, row_index, to_column

# Exponents of a base block that is anchored in its middle stay below this: e^40 squared is far inside float32.
_SAFE_EXPONENT = 40.0
LOG2_E = 1.4426950408889634
# Rows of one vector register: blocks of so many rows are taken apart and put together for free.
SUBLANES = 8
# Diagonal blocks of so many rows are inverted by substitution.
SUBSTITUTED = 16


def base_block(C: int, gate_lower_bound: float | None) -> int:
    """Return the size of the diagonal blocks that one product anchored in the middle covers; 1 without a bound."""
    if gate_lower_bound is None:
        return 1
    size = 1
    while 2 * size <= C and size * -gate_lower_bound <= _SAFE_EXPONENT:
        size *= 2
    return size


def level_matrix(C: int) -> np.ndarray:
    """Return the 0/1 matrix [4 C, C] whose product with g [C, K] gives the sums of the small levels.

    Sums of levels 2 and 4 (see `widen`), then the inclusive sums from the start of every block of 8 rows and the
    exclusive ones to its end.
    """
    i, t = np.arange(C)[:, None], np.arange(C)[None]

    def prefix(b):
        return ((t // b) == (i // b)) & (t <= i)

    def suffix(b):
        return ((t // b) == (i // b)) & (t > i)

    levels = [np.where(i & b, prefix(b), suffix(b)) for b in (2, 4)]
    return np.concatenate([*levels, prefix(SUBLANES), suffix(SUBLANES)])


def _high(x):
    """Return x cut to the bits that bfloat16 holds; a mask, because a compiler may drop a cast there and back."""
    bits = lax.bitcast_convert_type(x, jnp.int32) & jnp.int32(-65536)
    return lax.bitcast_convert_type(bits, jnp.float32)


def split2(x: jax.Array) -> list[jax.Array]:
    """Return x as the sum of two bfloat16 arrays, 16 bits of it."""
    high = _high(x)
    return [high.astype(jnp.bfloat16), (x - high).astype(jnp.bfloat16)]


def split3(x: jax.Array) -> list[jax.Array]:
    """Return x as the sum of three bfloat16 arrays, all of its bits."""
    high = _high(x)
    return [high.astype(jnp.bfloat16), *split2(x - high)]


def fine_dot(a, b, dtype):
    """Return a b with 16 bits of either operand in one product: where bfloat16 would not do for the operands.

    Where keys repeat, new values alternate and their sums cancel: rounding them one by one to bfloat16 would cost
    ten times the accuracy. The two halves of an operand lie side by side in the contraction.
    """
    if operand_dtype(dtype) == jnp.float32:
        return dot(a, b, dtype)
    (a_high, a_low), (b_high, b_low) = split2(a), split2(b)
    return dot(jnp.concatenate([a_high, a_high, a_low], 2), jnp.concatenate([b_high, b_low, b_high], 1), dtype)


def fine_tn(a, b, dtype):
    """Return a^T b; see `fine_dot`."""
    if operand_dtype(dtype) == jnp.float32:
        return dot_tn(a, b, dtype)
    (a_high, a_low), (b_high, b_low) = split2(a), split2(b)
    return dot_tn(jnp.concatenate([a_high, a_high, a_low], 1), jnp.concatenate([b_high, b_low, b_high], 1), dtype)


def fine_nt(a, b, dtype):
    """Return a b^T; see `fine_dot`."""
    if operand_dtype(dtype) == jnp.float32:
        return dot_nt(a, b, dtype)
    (a_high, a_low), (b_high, b_low) = split2(a), split2(b)
    return dot_nt(jnp.concatenate([a_high, a_high, a_low], 2), jnp.concatenate([b_high, b_low, b_high], 2), dtype)


def fine_columns(rows, columns, dtype):
    """Return rows columns^T with 16 bits of the columns only.

    The rounding of a row is the same for all its columns: it acts like another query or key, and no sum of new values
    amplifies it. That of a column differs from row to row of the sum.
    """
    if operand_dtype(dtype) == jnp.float32:
        return dot_nt(rows, columns, dtype)
    rows = rows.astype(jnp.bfloat16)
    return dot_nt(jnp.concatenate([rows, rows], 2), jnp.concatenate(split2(columns), 2), dtype)


class Sums(NamedTuple):
    """Sums of the gate over the chunk, to base 2, all of one sign, so that nothing cancels.

    Attributes:
      levels: per level b = 1, 2, ..., C/2 [h, C, K]: in right halves the sum over (n, i], in left halves over (j, n].
      prefix: [h, C, K], the sum from the first row to i, both included.
      suffix: [h, C, K], the sum over the rows after i.
    """

    levels: list[jax.Array]
    prefix: jax.Array
    suffix: jax.Array


def widen(prefix: jax.Array, suffix: jax.Array, levels: list[jax.Array], b: int) -> Sums:
    """Return all sums from those of blocks of b rows by joining neighbouring blocks."""
    h, C, K = prefix.shape
    while b < C:
        shape = (h, C // (2 * b), 2, b, K)
        (P_left, P_right), (S_left, S_right) = (
            (x[:, :, 0], x[:, :, 1]) for x in (prefix.reshape(shape), suffix.reshape(shape))
        )
        levels = [*levels, jnp.stack([S_left, P_right], 2).reshape(h, C, K)]
        prefix = jnp.stack([P_left, P_right + P_left[:, :, -1:]], 2).reshape(h, C, K)
        suffix = jnp.stack([S_left + P_right[:, :, -1:], S_right], 2).reshape(h, C, K)
        b *= 2
    return Sums(levels, prefix, suffix)


def level_pairs(i, j, b: int) -> jax.Array:
    """Return whether pairs (i, j) of row indices belong to level b."""
    return ((i ^ j) < 2 * b) & ((i & b) > (j & b))


def level_mask(C: int, b: int) -> jax.Array:
    """Return [1, C, C]: the pairs of level b."""
    return level_pairs(row_index(C), column_index(C), b)


def middle_exponent(levels, base: int) -> jax.Array:
    """Return the sums from the middle of every block of `base` rows to each row: negative after it, positive before."""
    d = levels[base.bit_length() - 2]
    after = (lax.broadcasted_iota(jnp.int32, d.shape, 1) & (base // 2)) != 0
    return jnp.where(after, d, -d)


def twice(x: jax.Array) -> jax.Array:
    """Return x above x: the same for the rows of queries and of keys."""
    return jnp.concatenate([x, x], axis=1)


def interaction_tile(rows, k, levels, base, dtype):
    """Return the decayed products of queries and keys with keys.

    Args:
      rows: [h, 2 C, K], queries above keys.
      k: [h, C, K].
      levels: the sums of the gate per level.
      base: rows of the diagonal blocks that one product covers; 1 for any gate.
      dtype: of the operands of the products.

    Returns:
      [h, 2 C, C] float32: <q_i, e^(G_i - G_j) k_j> above <k_i, e^(G_i - G_j) k_j> for i >= j, else 0.
    """
    h, C, _ = k.shape
    i, j = row_index(C), column_index(C)
    if base == 1:
        own = jnp.where(i == j, jnp.sum(rows[:, :C] * k, axis=-1, keepdims=True), 0.0)
        out = jnp.concatenate([own, jnp.zeros_like(own)], axis=1)
    else:
        d = middle_exponent(levels, base)
        inside = ((i ^ j) < base) & (i >= j)
        out = jnp.where(twice(inside), fine_columns(rows * twice(jnp.exp2(d)), k * jnp.exp2(-d), dtype), 0.0)
    for level in range(base.bit_length() - 1, len(levels)):
        b, e = 1 << level, jnp.exp2(levels[level])
        if b < SUBLANES:
            products = fine_columns(rows * twice(e), k * e, dtype)
            out = jnp.where(twice(level_mask(C, b)), products, out)
            continue
        # Only right halves have pairs as rows; taking whole registers apart is free.
        right, left_out, right_out = halves(rows, b)[1], *halves(out, b)
        products = fine_columns(right * twice(halves(e, b)[1]), k * e, dtype)
        mask = twice(halves(jnp.broadcast_to(level_mask(C, b), (h, C, C)), b)[1])
        out = join_halves(left_out, jnp.where(mask, products, right_out), b)
    return out


def halves(x, b):
    """Return the rows of left and of right halves of every 2b rows of x [h, R, D], each [h, R / 2, D]."""
    h, R, D = x.shape
    x = x.reshape(h, R // (2 * b), 2, b, D)
    return x[:, :, 0].reshape(h, R // 2, D), x[:, :, 1].reshape(h, R // 2, D)


def join_halves(left, right, b):
    """Return [h, R, D] from the rows of left and of right halves; the inverse of `halves`."""
    h, R, D = left.shape
    parts = [x.reshape(h, R // b, b, D) for x in (left, right)]
    return jnp.stack(parts, axis=2).reshape(h, 2 * R, D)


def spread(x: jax.Array, b: int, j: int) -> jax.Array:
    """Return x [h, R, L] with column j of every block of b lanes copied over the block."""
    h, R, L = x.shape
    lane = lax.broadcasted_iota(jnp.int32, (h * R, L), 1)
    return jnp.take_along_axis(x.reshape(h * R, L), (lane & -b) + j, axis=1).reshape(h, R, L)


def substitute(M, b):
    """Return (I + M)^-1 of the blocks of b lanes of M [h, b, L], strictly lower, side by side: row after row."""
    h, _, L = M.shape
    shape = (h, SUBLANES, L)
    row, column = (lax.broadcasted_iota(jnp.int32, shape, axis) for axis in (1, 2))
    # Only what has lower rows is touched: register n holds rows 8 n to 8 n + 7.
    X = [jnp.where((column & (b - 1)) == row + n * SUBLANES, 1.0, 0.0) for n in range(b // SUBLANES)]
    for j in range(b - 1):
        at = j // SUBLANES
        solved = X[at][:, j % SUBLANES : j % SUBLANES + 1]
        factor = spread(M[:, at * SUBLANES :], b, j)
        for n in range(at, len(X)):
            X[n] = X[n] - factor[:, (n - at) * SUBLANES : (n - at + 1) * SUBLANES] * solved
    return jnp.concatenate(X, axis=1)


def inverse_tile(M, dtype=jnp.float32):
    """Return (I + M)^-1 of strictly lower M [h, C, C], exactly.

    The diagonal blocks, two heads side by side where that fills the lanes, are solved row by row without the matrix
    unit. Then neighbouring blocks are joined, (2b, 2b) from (b, b): the corner is -X_right M_corner X_left. Products
    take float32 operands, or 16 bits of them where `dtype` is bfloat16 and M itself holds no more.
    """
    h, C, _ = M.shape
    b = min(C, SUBSTITUTED)
    column_block = lax.broadcasted_iota(jnp.int32, (1, b, C), 2) >> (b.bit_length() - 1)
    blocks = [jnp.where(column_block == n, M[:, n * b : (n + 1) * b], 0.0) for n in range(C // b)]
    packed = functools.reduce(jnp.add, blocks)
    paired = h % 2 == 0 and C <= 64
    if paired:
        packed = jnp.concatenate([packed[: h // 2], packed[h // 2 :]], axis=2)
    X = substitute(packed, b)
    if paired:
        X = jnp.concatenate([X[:, :, :C], X[:, :, C:]], axis=0)
    X = jnp.concatenate([jnp.where(column_block == n, X, 0.0) for n in range(C // b)], axis=1)
    while b < C:
        # Only the lower rows of a pair of blocks change.
        upper, lower_left = halves(X, b)
        S = jnp.where(halves(jnp.broadcast_to(level_mask(C, b), M.shape), b)[1], halves(M, b)[1], 0.0)
        corner = fine_dot(S, X, dtype)
        corner = join_halves(jnp.zeros_like(corner), corner, b)
        X = join_halves(upper, lower_left - fine_dot(lower_left, corner, dtype), b)
        b *= 2
    return X


class Masks(NamedTuple):
    """Which rows of a chunk that holds several sequences belong together.

    Attributes:
      same: [1, C, C], rows of one sequence.
      carried, ending: [1, C, 1], rows of the sequence that is open where the chunk begins and ends.
      through: [1, 1, 1], the chunk lies inside one sequence.
      valid: [1, C, 1], rows of any sequence; None where the caller masks its rows itself.
    """

    same: jax.Array
    carried: jax.Array
    ending: jax.Array
    through: jax.Array
    valid: Any


def stream_tile(owner, opening, sequences) -> Masks:
    """Return the masks of a chunk from the sequence of every row [1, 1, C] and the one that is open before it."""
    row = owner.astype(jnp.float32)
    col, last = to_column(row), last_valid(row)
    opening = opening.astype(jnp.float32)
    return Masks(col == row, col == opening, col == last, last == opening, col < sequences)


def boundary_tile(sums: Sums, masks: Masks | None):
    """Return the decays to the boundaries of the chunk.

    Returns:
      from_start [h, C, K], from the start of the chunk to each row, zero for rows of later sequences.
      to_end [h, C, K], from each row to the end, zero for rows of sequences that ended.
      through [h, 1, K], over the whole chunk, zero if a sequence ends in it.
    """
    C = sums.prefix.shape[1]
    from_start, to_end, through = jnp.exp2(sums.prefix), jnp.exp2(sums.suffix), jnp.exp2(sums.prefix[:, C - 1 :])
    if masks is not None:
        from_start, to_end = jnp.where(masks.carried, from_start, 0.0), jnp.where(masks.ending, to_end, 0.0)
        through = jnp.where(masks.through, through, 0.0)
    return from_start, to_end, through


def output_tile(S, rows, k, v, beta_col, scores, X, boundary, dtype):
    """Return the output of a chunk and the state after it.

    Args:
      S: [h, V, K] float32, the transposed state before the chunk.
      rows: [h, 2 C, K], scaled queries above keys.
      k, v: [h, C, K], [h, C, V].
      beta_col: [h, C, 1].
      scores: [h, C, C], queries with keys.
      X: [h, C, C], the inverse.
      boundary: of `boundary_tile`.
      dtype: of the operands of the products.

    Returns:
      (o [h, C, V] float32, S [h, V, K]).
    """
    C = k.shape[1]
    from_start, to_end, through = boundary
    seen = dot_nt(rows * twice(from_start), S, dtype)
    v_new = fine_dot(X, beta_col * (v - seen[:, C:]), dtype)
    return seen[:, :C] + fine_dot(scores, v_new, dtype), through * S + fine_tn(v_new, k * to_end, dtype)
