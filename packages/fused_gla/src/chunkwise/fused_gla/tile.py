"""The mathematics of one chunk of gated linear attention, forward and backward; arrays in, arrays out.

The pairs of tokens of a chunk whose gates are per channel are in `channels`.

Tiles are [h, C, D]: h heads in lock-step, C tokens. Tiles of queries and keys are [n, C, K], for n key heads: products
that do not depend on gates or values are computed once for all value heads of a key head. A gate is a row [h, 1, C]
(one value per token) or a tile [h, C, K] (one per channel). The state layout is not the user's [K, V]: kernels keep the
transposed state S [h, V, K], so that a decay per channel is a row [h, 1, K] that multiplies it.

Every exponent is a sum of gates over a span of tokens, added up directly and never taken as a difference of two
cumulative sums: no exponent is positive, and a small sum beside a large one keeps all its digits. The sums are products
with matrices of zeros and ones.

The user's bfloat16 tiles are exact as operands of a product. A computed tile enters a product in `parts` of 8 bits. One
part is enough for gradients of tensors. The gradient of a constant gate is a sum over all tokens, whose terms cancel,
and takes two parts.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from chunkwise.shared.kernels import matmul, packed, tiles
from chunkwise.shared.kernels.spans import layout


class GlaDecays(NamedTuple):
    """The decays of a chunk, at most 1 but for `channels.Factors`; those that lead to outputs are times the scale.

    Attributes:
      pairs: [h, C, C], scale times the decay from token j to token i >= j of one sequence, else 0. For gates per
        channel `channels.Factors`, or the result of `channels.level_decays`, or nothing.
      from_start: [h, C, 1 or K], scale times the decay from the start of the chunk, or of the token's sequence in it,
        to the token.
      to_end: [h, C, 1 or K], the decay from the token to the end of the chunk, or of its sequence in it.
      through: [h, 1, 1 or K], the decay over the whole chunk.
      scale: the scale, float32.
    """

    pairs: Any
    from_start: jax.Array
    to_end: jax.Array
    through: jax.Array
    scale: jax.Array | float

    def of(self, heads: slice) -> "GlaDecays":
        """Return the decays of some heads, all arrays."""
        return GlaDecays(*(x[heads] for x in self[:4]), self.scale)


def within(mask: jax.Array, same: jax.Array | None) -> jax.Array:
    """Return the pairs of a mask that are of one sequence."""
    return mask if same is None else mask & same


def for_heads(x: jax.Array, h: int) -> jax.Array:
    """Return x [1 or h, ...] as [h, ...]."""
    return jnp.broadcast_to(x, (h, *x.shape[1:]))


def constant_decays(gamma: jax.Array, scale: jax.Array | float, C: int) -> GlaDecays:
    """Return the decays of a whole chunk of one sequence whose gate is gamma [h, 1, 1] for every token."""
    # Every exponent is a number of tokens times the gate, which takes no sums and no matrix products.
    after_start = lax.broadcasted_iota(jnp.int32, (1, C, 1), 1).astype(jnp.float32)  # [1, C, 1]
    apart = (tiles.row_index(C) - tiles.column_index(C)).astype(jnp.float32)  # [1, C, C]
    return GlaDecays(
        pairs=scale * tiles.masked_exp(apart * gamma, tiles.lower(C)),
        from_start=scale * jnp.exp((after_start + 1.0) * gamma),
        to_end=jnp.exp((C - 1.0 - after_start) * gamma),
        through=jnp.exp(C * gamma),
        scale=scale,
    )


def scores(q: jax.Array, k: jax.Array, decays: GlaDecays) -> jax.Array:
    """Return P_ij = scale <q_i, e^(G_i - G_j) k_j> for i >= j of one sequence, else 0, as [h, C, C] float32."""
    return tiles.repeat_heads(matmul.dot_nt(q, k), decays.pairs.shape[0]) * decays.pairs  # [h, C, C]


def to_key_heads(x: jax.Array, heads: int) -> jax.Array:
    """Return x [h, ...] summed over the value heads of each key head, [heads, ...] for `heads` key heads."""
    return x if x.shape[0] == heads else layout.sum_value_heads(x, x.shape[0] // heads)


def scaled(x: jax.Array, decay: jax.Array) -> jax.Array:
    """Return x times a decay, computed in float32 and then rounded once to the type of x."""
    return (x.astype(jnp.float32) * decay).astype(x.dtype)


def operands(x: jax.Array, dtype, parts: int) -> tuple[jax.Array, ...]:
    """Return x as operands of `dtype`: x itself, or bfloat16 parts if x was computed."""
    return (x,) if x.dtype == dtype else matmul.bf16_parts(x, parts)


def _product(contract, a: jax.Array, b: jax.Array, dtype, parts: int) -> jax.Array:
    """Return a product by a function of `matmul`, from operands of `dtype`, without products of two second parts."""
    left, right = packed.part_pairs(operands(a, dtype, parts), operands(b, dtype, parts))
    axes = {matmul.dot: (2, 1), matmul.dot_nt: (2, 2), matmul.dot_tn: (1, 1)}[contract]
    return contract(*(jnp.concatenate(x, axis=axis) for x, axis in zip((left, right), axes, strict=True)))


def read_state(q: jax.Array, S: jax.Array, from_start: jax.Array) -> jax.Array:
    """Return the value that every token reads from the state before the chunk, times the scale, [h, C, V] float32."""
    q = tiles.repeat_heads(q, S.shape[0])
    if from_start.shape[2] == 1:
        return from_start * matmul.dot_nt(q, S.astype(q.dtype))
    return matmul.dot_nt(scaled(q, from_start), S.astype(q.dtype))


def read_chunk(P: jax.Array, v: jax.Array) -> jax.Array:
    """Return the value that every token reads from its chunk by the scores P, [h, C, V] float32."""
    return matmul.dot(P.astype(v.dtype), v)


def next_state(S: jax.Array, k: jax.Array, v: jax.Array, to_end: jax.Array, through: jax.Array, parts=1) -> jax.Array:
    """Return the state after the chunk, [h, V, K] float32."""
    k = tiles.repeat_heads(k, v.shape[0])
    return through * S + _product(matmul.dot_tn, v, k.astype(jnp.float32) * to_end, v.dtype, parts)


def chunk_products(S, dS, q, k, v, do, parts, by_keys: jax.Array | None = None):
    """Return products for `chunk_bwd`, of a chunk of constant gates, that wait for no other product.

    Args:
      S: [h, V, K], the state before the chunk.
      dS: [h, V, K], the gradient of the state after it.
      q, k, v, do: tiles; do is the gradient of the output.
      parts: how many parts S, dS and the decayed q have.
      by_keys: the first result, if other heads of the same group computed it.

    Returns:
      The product of k and q, [n, C, C]; and a tuple: the products of k and dS [h, C, V], v and dS [h, C, K], v and do
      [h, C, C], which is the gradient of the scores, transposed, and do and S [h, C, K]; and do transposed, repeated
      for every part of the decayed q, [h, V, parts C].

    The matrix unit keeps the right operand of a product, and to load it takes time. So right operands with a common
    left operand are side by side, and the scores are transposed, as two of the three products that read them need.
    """
    transposed = lambda x: jnp.swapaxes(x, 1, 2)
    dS, *dS_more = operands(dS, q.dtype, parts)  # [h, V, K] each
    do_t = transposed(jnp.concatenate([do] * (1 + len(dS_more)), axis=1))  # [h, V, parts C]
    of_v = matmul.dot(v, jnp.concatenate([dS, do_t[:, :, : do.shape[1]]], axis=2))  # [h, C, K + C]
    lanes = v.shape[0] // k.shape[0] * v.shape[2]
    right = [side_by_side(transposed(dS), k.shape[0])] + ([transposed(q)] if by_keys is None else [])
    of_k = matmul.dot(k, jnp.concatenate(right, axis=2))  # [n, C, lanes + C]
    by_keys = of_k[:, :, lanes:] if by_keys is None else by_keys
    by_v = of_v[:, :, : q.shape[2]] + sum(matmul.dot(v, part) for part in dS_more)
    by_do = _product(matmul.dot, do, S, q.dtype, parts)
    return by_keys, (one_by_one(of_k[:, :, :lanes], v.shape[0]), by_v, of_v[:, :, q.shape[2] :], by_do, do_t)


def side_by_side(x: jax.Array, n: int) -> jax.Array:
    """Return tiles [h, R, L] as [n, R, h / n L]: the value heads of a key head side by side in the lanes."""
    if x.shape[0] == n:
        return x
    grouped = x.reshape(n, -1, *x.shape[1:])
    return jnp.concatenate([grouped[:, i] for i in range(grouped.shape[1])], axis=2)


def one_by_one(x: jax.Array, h: int) -> jax.Array:
    """Return [n, R, h / n L] as tiles [h, R, L]; the inverse of `side_by_side`."""
    if x.shape[0] == h:
        return x
    L = x.shape[0] * x.shape[2] // h
    each = [x[:, :, i : i + L] for i in range(0, x.shape[2], L)]
    return jnp.stack(each, axis=1).reshape(h, x.shape[1], L)


def chunk_bwd(by_keys, products, S, dS, q, k, do, decays: GlaDecays, parts, before, last: bool):
    """Return all gradients of a chunk of constant gates, float32.

    Args:
      by_keys, products: the results of `chunk_products`.
      S, dS, q, k, do, parts: as in `chunk_products`.
      decays: the decays of the chunk, those of pairs transposed; to_end, if it is repeated over lanes, is at least as
        wide as K and V.
      before: the sums of the earlier heads of the same group, None for the first heads of a group.
      last: whether these heads are the last ones of their group, or of the block's part of the group.

    Returns:
      Sums over these heads and the earlier heads of their group: of the gradient of the scores times their decay,
      transposed [n, C, C], and of the gradients of q and k through the states [n, C, K]. Then the gradients: of q and k
      [n, C, K], None unless these heads are the last ones of their group; of v [h, C, V]; of the state before the chunk
      [h, V, K]; and of the exponents: in `pairs` [h, C, C], transposed, also on the diagonal, of from_start and to_end
      by channel [h, C, K], and of through [h, 1, 1 or K].
    """
    by_k, by_v, dP, by_do, do_t = products
    pairs_t = decays.pairs
    n, dtype, K, V = q.shape[0], q.dtype, q.shape[2], do.shape[2]
    by_keys, q_each = (tiles.repeat_heads(x, do.shape[0]) for x in (by_keys, q))  # [h, C, C], [h, C, K]
    # P [h, C, C], transposed like dP, and dS before the chunk [h, V, K].
    P, dS_before = pairs_t * by_keys, decays.through * dS
    q_decayed = q_each.astype(jnp.float32) * decays.from_start  # [h, C, K]
    # The gradients through the states, [h, C, K]; the gradients through the scores are added below.
    dq, dk = decays.from_start * by_do, decays.to_end[:, :, :K] * by_v
    sums = tuple(to_key_heads(x, n) for x in (pairs_t * dP, dq, dk))
    if before is not None:
        sums = tuple(x + y for x, y in zip(before, sums, strict=True))
    decayed = sums[0].astype(dtype)  # [n, C, C]
    exponents = (
        P * dP,
        q_each.astype(jnp.float32) * dq,
        tiles.repeat_heads(k, do.shape[0]).astype(jnp.float32) * dk,
        jnp.sum(S * dS_before, axis=(1, 2) if decays.through.shape[2] == 1 else 1, keepdims=True),
    )
    return (
        sums,
        sums[1] + matmul.dot(jnp.swapaxes(decayed, 1, 2), k) if last else None,
        sums[2] + matmul.dot(decayed, q) if last else None,
        decays.to_end[:, :, :V] * by_k + matmul.dot(P.astype(dtype), do),
        dS_before + matmul.dot(do_t, jnp.concatenate(operands(q_decayed, dtype, parts), axis=1)),
        exponents,
    )


def constant_gate_bwd(exponents, d_from_start, d_to_end, d_through) -> jax.Array:
    """Return a chunk's part of the gradient of a constant gate, as terms [h, 8, max(C, K)] of a sum.

    Each exponent of `constant_decays` is a number of tokens times the gate.

    Args:
      exponents: [h, C, C], transposed, as `chunk_bwd` returns them.
      d_from_start, d_to_end: [h, C, K], gradients of the exponents of `from_start` and `to_end`, by channel.
      d_through: the gradient of the exponent of `through`, [h, 1, K].
    """
    h, C, K = d_to_end.shape
    after_start = lax.broadcasted_iota(jnp.int32, (1, C, 1), 1).astype(jnp.float32)  # [1, C, 1]
    apart = (tiles.column_index(C) - tiles.row_index(C)).astype(jnp.float32)  # [1, C, C]
    # Whole registers are added up; the caller sums inside of them, once for all chunks.
    parts = lambda x: jnp.sum(x.reshape(h, -1, 8, x.shape[2]), axis=1)
    widen = lambda x: jnp.pad(x, [(0, 0), (0, 0), (0, max(C, K) - x.shape[2])])
    # The decay of the chunk is a term of only one row.
    first = lax.broadcasted_iota(jnp.int32, (1, 8, 1), 1) == 0
    states = parts((after_start + 1.0) * d_from_start + (C - 1.0 - after_start) * d_to_end)  # [h, 8, K]
    return widen(states) + widen(parts(apart * exponents)) + widen(jnp.where(first, C * d_through, 0.0))
