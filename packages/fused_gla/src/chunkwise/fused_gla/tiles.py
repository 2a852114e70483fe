"""The mathematics of one chunk of gated linear attention, forward and backward; arrays in, arrays out.

Tiles are [h, C, D]: h heads in lock-step, C tokens. A gate is a row [h, 1, C] (one value per token) or a tile [h, C, K]
(one per channel). The state is kept transposed, S [h, V, K]: a per-channel decay is then a row that multiplies it.

Every exponent is a sum of gates over a span of tokens, added up directly and never taken as a difference of two
cumulative sums: no exponent is positive, and a small sum beside a large one keeps all its digits. The sums are products
with matrices of zeros and ones.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from chunkwise.shared import column_index, dot, dot_nt, dot_tn, lower, masked_exp, row_index, strictly_lower


class Decays(NamedTuple):
    """The decays of a chunk, all at most 1.

    Attributes:
      pairs: [h, C, C], from token j to token i > j of one sequence, else 0; per channel a tuple of [h, C, K], for every
        level of `_levels` the decay between each token and the anchor of its block.
      from_start: [h, C, 1 or K], from the start of the chunk, or of the token's sequence in it, to the token.
      to_end: [h, C, 1 or K], from the token to the end of the chunk, or of its sequence in it.
      through: [h, 1, 1 or K], over the whole chunk.
    """

    pairs: jax.Array | tuple[jax.Array, ...]
    from_start: jax.Array
    to_end: jax.Array
    through: jax.Array


def _levels(C: int) -> list[int]:
    """Return the half block sizes: every pair i > j is split by the middle of exactly one block of 2b tokens."""
    return [1 << n for n in reversed(range(C.bit_length() - 1))]


def _split_by(b: int, C: int) -> jax.Array:
    """Return the pairs i > j that the middle of a block of 2b tokens splits: b is their highest differing bit."""
    i, j = row_index(C), column_index(C)
    return (i > j) & ((i ^ j) >= b) & ((i ^ j) < 2 * b)


def _spans(C: int, same: jax.Array | None) -> jax.Array:
    """Return the spans of all per-channel exponents as [1, (levels + 2) C, C] of zeros and ones.

    First, for every level, the tokens between each token and the last one of the left half of its block; then those up
    to each token, then those after it, within its sequence.
    """
    i, m = row_index(C), column_index(C)
    # In the right half of a block the tokens up to i, in the left half those after it.
    agree = lambda x, y: (x & y) | ~(x | y)
    spans = [((i ^ m) < b) & agree((i & b) != 0, m <= i) for b in _levels(C)]
    spans += [_within(m <= i, same), _within(m > i, same)]
    h = spans[-1].shape[0]
    return jnp.concatenate([_for_heads(x, h).astype(jnp.float32) for x in spans], axis=1)


def _within(mask: jax.Array, same: jax.Array | None) -> jax.Array:
    return mask if same is None else mask & same


def _per_channel(g: jax.Array) -> bool:
    return g.shape[1] > 1


def _for_heads(x: jax.Array, h: int) -> jax.Array:
    return jnp.broadcast_to(x, (h, *x.shape[1:]))


def decays(g: jax.Array, same: jax.Array | None = None) -> Decays:
    """Return the decays of a chunk.

    Args:
      g: gates in nats, [h, 1, C] or [h, C, K], zero on padding.
      same: bool [1 or h, C, C], whether two tokens belong to one sequence; None if all do.
    """
    if _per_channel(g):
        h, C, _ = g.shape
        sums = dot(_for_heads(_spans(C, same), h), g)
        *pairs, from_start, to_end = (jnp.exp(sums[:, n : n + C]) for n in range(0, sums.shape[1], C))
        return Decays(tuple(pairs), from_start, to_end, jnp.exp(jnp.sum(g, axis=1, keepdims=True)))
    h, C = g.shape[0], g.shape[2]
    up_to = jnp.where(lower(C), g, 0.0)
    between = dot(up_to, _for_heads(strictly_lower(C).astype(jnp.float32), h))
    own = up_to if same is None else jnp.where(same, up_to, 0.0)
    after = jnp.where(_within(~lower(C), same), g, 0.0)
    return Decays(
        pairs=jnp.where(_within(strictly_lower(C), same), jnp.exp(between), 0.0),
        from_start=jnp.exp(jnp.sum(own, axis=2, keepdims=True)),
        to_end=jnp.exp(jnp.sum(after, axis=2, keepdims=True)),
        through=jnp.exp(jnp.sum(g, axis=2, keepdims=True)),
    )


def constant_decays(gamma: jax.Array, C: int) -> Decays:
    """Return the decays of a whole chunk of one sequence whose gate is gamma [h, 1, 1] for every token."""
    after_start = lax.broadcasted_iota(jnp.int32, (1, C, 1), 1).astype(jnp.float32)
    apart = (row_index(C) - column_index(C)).astype(jnp.float32)
    return Decays(
        pairs=masked_exp(apart * gamma, strictly_lower(C)),
        from_start=jnp.exp((after_start + 1.0) * gamma),
        to_end=jnp.exp((C - 1.0 - after_start) * gamma),
        through=jnp.exp(C * gamma),
    )


def scores(q: jax.Array, k: jax.Array, pairs, same: jax.Array | None = None) -> jax.Array:
    """Return P_ij = <q_i, e^(G_i - G_j) k_j> for i >= j of one sequence, else 0, as [h, C, C] float32."""
    C = q.shape[1]
    diagonal = row_index(C) == column_index(C)
    if not isinstance(pairs, tuple):
        return dot_nt(q, k) * jnp.where(diagonal, 1.0, pairs)
    P = jnp.where(diagonal, jnp.sum(q.astype(jnp.float32) * k.astype(jnp.float32), axis=2, keepdims=True), 0.0)
    for b, decay in zip(_levels(C), pairs, strict=True):
        product = dot_nt(_scaled(q, decay), _scaled(k, decay))
        P = jnp.where(_within(_split_by(b, C), same), product, P)
    return P


def _scaled(x: jax.Array, decay: jax.Array) -> jax.Array:
    """Return x decayed, as an operand of the type of x: decayed in float32, then rounded once."""
    return (x.astype(jnp.float32) * decay).astype(x.dtype)


def read_state(q: jax.Array, S: jax.Array, from_start: jax.Array) -> jax.Array:
    """Return what every token reads from the state before the chunk, [h, C, V] float32."""
    if from_start.shape[2] == 1:
        return from_start * dot_nt(q, S.astype(q.dtype))
    return dot_nt(_scaled(q, from_start), S.astype(q.dtype))


def next_state(S: jax.Array, k: jax.Array, v: jax.Array, to_end: jax.Array, through: jax.Array) -> jax.Array:
    """Return the state after the chunk, [h, V, K] float32."""
    return through * S + dot_tn(v, _scaled(k, to_end))


class ScoreGradients(NamedTuple):
    """Gradients that come through the scores: of q and k, and of the exponents in `Decays.pairs`."""

    q: jax.Array
    k: jax.Array
    exponents: jax.Array | tuple[jax.Array, ...]


def scores_bwd(dP: jax.Array, q: jax.Array, k: jax.Array, pairs, P: jax.Array, same=None) -> ScoreGradients:
    """Return the gradients of `scores` given dP [h, C, C] float32, whatever it holds outside of the pairs, and P.

    The diagonal of P does not depend on the gates: leaving it out of their gradient matters where the decays are 1e-13.
    """
    C, dtype = q.shape[1], q.dtype
    if not isinstance(pairs, tuple):
        decayed = (dP * jnp.where(row_index(C) == column_index(C), 1.0, pairs)).astype(dtype)
        exponents = jnp.where(strictly_lower(C), dP * P, 0.0)
        return ScoreGradients(dot(decayed, k), dot_tn(decayed, q), exponents)
    on_diagonal = jnp.sum(jnp.where(row_index(C) == column_index(C), dP, 0.0), axis=2, keepdims=True)
    q32, k32 = q.astype(jnp.float32), k.astype(jnp.float32)
    dq, dk, exponents = on_diagonal * k32, on_diagonal * q32, []
    for b, decay in zip(_levels(C), pairs, strict=True):
        own = jnp.where(_within(_split_by(b, C), same), dP, 0.0).astype(dtype)
        dq_b = decay * dot(own, _scaled(k, decay))
        dk_b = decay * dot_tn(own, _scaled(q, decay))
        dq, dk = dq + dq_b, dk + dk_b
        exponents.append(q32 * dq_b + k32 * dk_b)
    return ScoreGradients(dq, dk, tuple(exponents))


class StateGradients(NamedTuple):
    """Gradients that come through the state of a chunk; `through` is that of the exponent of `Decays.through`."""

    q: jax.Array
    k: jax.Array
    v: jax.Array
    through: jax.Array
    S: jax.Array


def state_bwd(S, dS, q, k, v, do, scale, from_start, to_end, through) -> StateGradients:
    """Return the gradients of `read_state` and `next_state` together.

    Args:
      S: [h, V, K], the state before the chunk.
      dS: [h, V, K], the gradient of the state after it.
      q, k, v, do: tiles; do is the gradient of the output, which is what is read times scale.
      scale: float32.
      from_start, to_end, through: as in `Decays`.
    """
    axes = (1, 2) if through.shape[2] == 1 else 1
    dS_mxu = dS.astype(q.dtype)
    return StateGradients(
        q=from_start * (scale * dot(do, S.astype(q.dtype))),
        k=to_end * dot(v, dS_mxu),
        v=dot_nt(_scaled(k, to_end), dS_mxu),
        through=through * jnp.sum(S * dS, axis=axes, keepdims=True),
        S=through * dS + scale * dot_tn(do, _scaled(q, from_start)),
    )


def gate_bwd(exponents, d_from_start: jax.Array, d_to_end: jax.Array, same: jax.Array | None = None) -> jax.Array:
    """Return the gradient of the gates of a chunk from those of its exponents, in the shape of the gates.

    Args:
      exponents: as in `ScoreGradients`.
      d_from_start, d_to_end: [h, C, K], gradients of the exponents of `from_start` and `to_end`, by channel.
      same: as in `decays`.
    """
    if isinstance(exponents, tuple):
        stacked = jnp.concatenate([*exponents, d_from_start, d_to_end], axis=1)
        h, C, _ = d_to_end.shape
        return dot_tn(_for_heads(_spans(C, same), h), stacked)
    # Token m sits in the exponent of every pair i >= m > j: sum over j < m by a product, then over i >= m.
    h, C, _ = exponents.shape
    before = _for_heads((row_index(C) < column_index(C)).astype(jnp.float32), h)
    through = dot(exponents, before) + jnp.where(_within(lower(C), same), _row_sum(d_from_start), 0.0)
    # Row i, column m: a token of the left part reaches its end through m > i.
    left = jnp.where(_within(~lower(C), same), _row_sum(d_to_end), 0.0)
    return jnp.sum(jnp.where(lower(C), through, left), axis=1, keepdims=True)


def constant_gate_bwd(exponents, d_from_start, d_to_end, d_through) -> jax.Array:
    """Return what a chunk adds to the gradient of a constant gate, as [h, 1, 1]; the arguments are those of `gate_bwd`.

    Each exponent of `constant_decays` is a number of tokens times the gate.
    """
    C = exponents.shape[1]
    after_start = lax.broadcasted_iota(jnp.int32, (1, C, 1), 1).astype(jnp.float32)
    apart = (row_index(C) - column_index(C)).astype(jnp.float32)
    states = (after_start + 1.0) * d_from_start + (C - 1.0 - after_start) * d_to_end
    total = lambda x: _row_sum(jnp.sum(x, axis=1, keepdims=True))
    return total(apart * exponents) + total(states) + C * d_through


def _row_sum(x: jax.Array) -> jax.Array:
    return jnp.sum(x, axis=2, keepdims=True)
