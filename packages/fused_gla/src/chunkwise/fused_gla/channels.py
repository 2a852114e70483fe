"""The pairs of tokens of a chunk with gates per channel: their decays, scores and gradients; arrays in, arrays out.

The decay from token j to token i > j is e^(the sum of the gates after j, up to i). It enters a matrix product as a
factor of row i times a factor of column j, and there are two ways to make these.

By levels: pairs belong to the level b = 1, 2, ..., C / 2 at which i is in the right and j in the left half of one block
of 2b tokens. The last token of the left half is between them, so both factors are decays. A level is one product, for
any gates.

By one product for all pairs: the factor of a row is the decay from the start of the chunk, or of the token's sequence
in it, and the factor of a column is the inverse of the same decay. The inverse may be too large. A column has zeros in
the channels where its decay is below e^`LEAST_SUM`, and its pairs in these channels are left over for levels. The
factors of a token have no gate of a later token, so no bit of a row of the scores depends on later tokens. Where the
factor of a row underflows, its pairs with the columns that are not left over have decays below 2^-62.

The gradient of a gate sums the terms of all rows from its token on, less their terms as columns. So pairs that are both
after the gate cancel, up to the rounding of float32 sums: a pair has one term, from factors that are rounded as the
products have them. For float32 products this is too much, and they go by levels. A token reads itself without a decay;
its pair is in no product, because it would be larger than all others where gates are strong.
"""

import enum
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from chunkwise.fused_gla import tile
from chunkwise.fused_gla.tile import GlaDecays, scaled, within
from chunkwise.shared.kernels import matmul, tiles

# The least sum of gates, in nats, of which a column has the inverse of the decay. The inverse, at most 2^64, is far
# from overflow as a factor of keys, and the decay is far from underflow as a factor of gradients.
LEAST_SUM = -44.0


class Pairs(enum.Enum):
    """How the decays of pairs are made, if at all."""

    NONE = enum.auto()
    LEVELS = enum.auto()
    PRODUCT = enum.auto()


class Factors(NamedTuple):
    """The factors of one product for all pairs, [h, C, K]; those of rows are times the scale.

    The factors of rows are not `GlaDecays.from_start`, which is zero in rows that do not read the state.
    """

    rows: jax.Array
    columns: jax.Array


def _levels(C: int) -> list[int]:
    """Return all b, powers of 2: the middle of exactly one block of 2b tokens separates tokens i > j."""
    return [1 << n for n in reversed(range(C.bit_length() - 1))]


def _split_by(b: int, C: int) -> jax.Array:
    """Return the pairs i > j separated by the middle of a block of 2b tokens: b is the highest bit that differs."""
    i, j = tiles.row_index(C), tiles.column_index(C)
    return (i > j) & ((i ^ j) >= b) & ((i ^ j) < 2 * b)


def _level_spans(C: int) -> list[jax.Array]:
    """Return for every level the tokens between each token and the last one of the left half of its block."""
    i, m = tiles.row_index(C), tiles.column_index(C)  # [1, C, C]
    # In the right half of a block a row adds up the tokens up to i, in the left half the tokens after i.
    agree = lambda x, y: (x & y) | ~(x | y)
    return [((i ^ m) < b) & agree((i & b) != 0, m <= i) for b in _levels(C)]


def _boundary_spans(C: int, same: jax.Array | None) -> list[jax.Array]:
    """Return the tokens up to each token, and the tokens after it, within its sequence, bool [1 or h, C, C] each."""
    i, m = tiles.row_index(C), tiles.column_index(C)  # [1, C, C]
    return [within(m <= i, same), within(m > i, same)]


def _stacked(spans: Sequence[jax.Array], h: int) -> jax.Array:
    """Return spans below one another as [h, n C, C] of zeros and ones."""
    most = spans[-1].shape[0]
    each = [tile.for_heads(x, most).astype(jnp.float32) for x in spans]
    return tile.for_heads(jnp.concatenate(each, axis=1), h)


def _sums(spans: Sequence[jax.Array], parts: tuple[jax.Array, ...]) -> list[jax.Array]:
    """Return the sums of gates over every span, [h, C, K] float32; the gates are the sum of parts [h, C, K]."""
    ones = _stacked(spans, parts[0].shape[0]).astype(parts[0].dtype)
    sums = matmul.dot(jnp.concatenate([ones] * len(parts), axis=2), jnp.concatenate(parts, axis=1))
    return jnp.split(sums, len(spans), axis=1)


def level_decays(parts: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
    """Return the decays of pairs by levels: for every level, from each token to the middle of its block, [h, C, K]."""
    return tuple(jnp.exp(x) for x in _sums(_level_spans(parts[0].shape[1]), parts))


def decays(
    g: jax.Array, scale: jax.Array | float, same: jax.Array | None = None, pairs: Pairs = Pairs.LEVELS,
    parts: tuple[jax.Array, ...] | None = None,
) -> GlaDecays:  # fmt: skip
    """Return the decays of a chunk.

    Args:
      g: gates in nats, [h, C, K], zero on padding.
      scale: the scale of the outputs, float32.
      same: bool [1 or h, C, C], whether two tokens belong to one sequence; None if all do.
      pairs: the decays of pairs that the caller reads.
      parts: bfloat16 tiles to multiply in the place of g, whose sum has as many bits of g as products need. Zeros and
        ones are exact in bfloat16, too, so one pass of the matrix unit loses nothing. None for g itself, if JAX
        differentiates the sums, because it would round the gradient of a bfloat16 tile.
    """
    C, parts = g.shape[1], parts or (g,)
    spans, found = _boundary_spans(C, same), ()
    if pairs is Pairs.NONE:
        # One product for each: the caller reads only one of the two, and a kernel computes only results that are read.
        up_to, after = (_sums([x], parts)[0] for x in spans)
    else:
        levels = _level_spans(C) if pairs is Pairs.LEVELS else []
        *found, up_to, after = _sums([*levels, *spans], parts)
    from_start = scale * jnp.exp(up_to)
    return GlaDecays(
        pairs=tuple(jnp.exp(x) for x in found) if pairs is not Pairs.PRODUCT else Factors(
            from_start, jnp.where(up_to < LEAST_SUM, 0.0, jnp.exp(-up_to))
        ),
        from_start=from_start,
        to_end=jnp.exp(after),
        through=jnp.exp(jnp.sum(g, axis=1, keepdims=True)),
        scale=scale,
    )  # fmt: skip


def _each(heads: int, *x: jax.Array) -> tuple[jax.Array, ...]:
    """Return queries and keys of key heads for every value head, float32."""
    return tuple(tiles.repeat_heads(y, heads).astype(jnp.float32) for y in x)


def _diagonal(C: int) -> jax.Array:
    return tiles.row_index(C) == tiles.column_index(C)


def scores(q: jax.Array, k: jax.Array, decays: GlaDecays, same: jax.Array | None = None) -> jax.Array:
    """Return P_ij = scale <q_i, e^(G_i - G_j) k_j> for i >= j of one sequence, else 0, as [h, C, C] float32.

    Without the pairs that one product leaves over.
    """
    C, heads = q.shape[1], decays.to_end.shape[0]
    if isinstance(decays.pairs, Factors):
        product = matmul.dot_nt(*_decayed(q, k, decays.pairs))  # [h, C, C]
        P = jnp.where(within(tiles.strictly_lower(C), same), product, 0.0)
    else:
        P = level_scores(q, k, decays.pairs, decays.scale, same)
    q, k = _each(heads, q, k)
    return jnp.where(_diagonal(C), decays.scale * jnp.sum(q * k, axis=2, keepdims=True), P)


def level_scores(q: jax.Array, k: jax.Array, levels, scale, same: jax.Array | None = None) -> jax.Array:
    """Return the scores of pairs i > j, by levels, [h, C, C] float32; levels are `GlaDecays.pairs`."""
    C, heads = q.shape[1], levels[0].shape[0]
    q, k = (tiles.repeat_heads(x, heads) for x in (q, k))
    P = jnp.zeros((heads, C, C), jnp.float32)
    for b, decay in zip(_levels(C), levels, strict=True):
        product = matmul.dot_nt(scaled(q, decay), scaled(k, decay))  # [h, C, C]
        P = jnp.where(within(_split_by(b, C), same), product, P)
    return scale * P


def _decayed(q: jax.Array, k: jax.Array, factors: Factors) -> tuple[jax.Array, jax.Array]:
    """Return queries times the factors of rows, and keys times those of columns, [h, C, K] in the type of products."""
    q, k = (tiles.repeat_heads(x, factors.columns.shape[0]) for x in (q, k))
    return scaled(q, factors.rows), scaled(k, factors.columns)


def scores_bwd(dP: jax.Array, q: jax.Array, k: jax.Array, decays: GlaDecays, same: jax.Array | None = None):
    """Return the gradients of `scores`, given dP [h, C, C] float32, which may hold anything outside of pairs.

    Returns:
      The gradients of q and k for every value head, [h, C, K]; and of the exponents: a list of those of every level,
      or of the rows of one product, less those of its columns.
    """
    (_, C, _), heads = q.shape, len(dP)
    if isinstance(decays.pairs, Factors):
        pairs = jnp.where(within(tiles.strictly_lower(C), same), dP, 0.0).astype(q.dtype)
        rows, columns = _decayed(q, k, decays.pairs)
        dq, dk = matmul.dot(pairs, columns), matmul.dot_tn(pairs, rows)  # [h, C, K]
        exponents = rows.astype(jnp.float32) * dq - columns.astype(jnp.float32) * dk
        dq, dk = decays.pairs.rows * dq, decays.pairs.columns * dk
    else:
        dq, dk, exponents = level_scores_bwd(dP, q, k, decays.pairs, decays.scale, same)
    q, k = _each(heads, q, k)
    itself = decays.scale * jnp.sum(jnp.where(_diagonal(C), dP, 0.0), axis=2, keepdims=True)  # [h, C, 1]
    return dq + itself * k, dk + itself * q, exponents


def level_scores_bwd(dP: jax.Array, q: jax.Array, k: jax.Array, levels, scale, same: jax.Array | None = None):
    """Return the gradients of `level_scores`, as `scores_bwd` does."""
    C, dtype, dP = q.shape[1], q.dtype, scale * dP
    q, k = _each(len(dP), q, k)  # [h, C, K]
    dq, dk, exponents = jnp.zeros_like(q), jnp.zeros_like(k), []
    for b, decay in zip(_levels(C), levels, strict=True):
        # Only the pairs that this level splits. This is a selection, because other pairs may hold anything.
        dP_b = jnp.where(within(_split_by(b, C), same), dP, 0.0)  # [h, C, C]
        dq_b = decay * matmul.dot(dP_b, k * decay, dtype)  # [h, C, K]
        dk_b = decay * matmul.dot_tn(dP_b, q * decay, dtype)  # [h, C, K]
        dq, dk = dq + dq_b, dk + dk_b
        exponents.append(q * dq_b + k * dk_b)
    return dq, dk, exponents


def any_left_over(decays: GlaDecays) -> jax.Array:
    """Return whether one product leaves pairs of the chunk over."""
    return jnp.min(decays.pairs.columns) == 0.0


def left_over(x: jax.Array, decays: GlaDecays) -> jax.Array:
    """Return keys or their gradients for every value head, with zeros in the channels of columns of the one product."""
    columns = decays.pairs.columns
    return jnp.where(columns == 0.0, tiles.repeat_heads(x, len(columns)), jnp.zeros((), x.dtype))


def state_bwd(S, dS, q, k, v, do, decays: GlaDecays):
    """Return the gradients of `tile.read_state` and `tile.next_state` together.

    Args:
      S: [h, V, K], the state before the chunk.
      dS: [h, V, K], the gradient of the state after it.
      q, k, v, do: tiles; do is the gradient of the output.
      decays: the decays of the chunk.

    Returns:
      The gradients of q and k for every value head, [h, C, K], of v, of the exponent of `through`, and of the
      state before the chunk.
    """
    q, k = (tiles.repeat_heads(x, v.shape[0]) for x in (q, k))
    dtype, dS_before = q.dtype, decays.through * dS  # [h, V, K]
    return (
        decays.from_start * matmul.dot(do, S, dtype),
        decays.to_end * matmul.dot(v, dS, dtype),
        matmul.dot_nt(scaled(k, decays.to_end), dS.astype(dtype)),
        jnp.sum(S * dS_before, axis=1, keepdims=True),
        dS_before + matmul.dot_tn(do, scaled(q, decays.from_start)),
    )


def level_gate_bwd(exponents: Sequence[jax.Array]) -> jax.Array:
    """Return the gradient of the gates, [h, C, K], from those of the exponents of all levels."""
    return _sum_spans(_level_spans(exponents[0].shape[1]), exponents)


def gate_bwd(
    exponents: jax.Array | list[jax.Array], d_from_start, d_to_end, same: jax.Array | None = None
) -> jax.Array:
    """Return the gradient of the gates of a chunk, [h, C, K], from gradients of its exponents.

    Args:
      exponents: as `scores_bwd` returns them.
      d_from_start, d_to_end: [h, C, K], gradients of the exponents of `from_start` and `to_end`.
      same: as in `decays`.
    """
    C = d_to_end.shape[1]
    spans = _boundary_spans(C, same)
    if isinstance(exponents, list):
        return _sum_spans([*_level_spans(C), *spans], [*exponents, d_from_start, d_to_end])
    return _sum_spans(spans, [exponents + d_from_start, d_to_end])


def _sum_spans(spans: Sequence[jax.Array], exponents: Sequence[jax.Array]) -> jax.Array:
    """Return for every gate the sum of the gradients of exponents, [h, C, K] each, whose spans it is in."""
    # Three parts of 8 bits lose nothing, and zeros and ones need only one part.
    ones = _stacked(spans, exponents[0].shape[0]).astype(jnp.bfloat16)
    high, middle, low = (matmul.dot_tn(ones, x) for x in matmul.bf16_parts(jnp.concatenate(exponents, axis=1)))
    return high + middle + low
