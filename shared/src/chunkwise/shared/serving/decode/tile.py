"""The mathematics of one token for each of n sequences: rows [n, lanes] of all sequences, and states head by head.

A decode over a ring may have a few tokens. Then the rows of the second tokens come after those of the first, and so on.

No operation mixes rows of different sequences, so NaN and infinity in one sequence change no other sequence.
"""

import functools
import itertools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from chunkwise.shared.kernels import activations, gate_activation, matmul, tiles
from chunkwise.shared.serving import state_pool
from chunkwise.shared.serving.decode.records import DecodeStatic

# How many bfloat16 numbers have a float32 number as their sum.
PARTS = 3


def convolve(taps: list[jax.Array], weight: jax.Array, bias: jax.Array | None, s: DecodeStatic) -> jax.Array:
    """Return the convolution of the last W inputs, the oldest first, [n, C] each, with a weight [W, C]."""
    y = taps[0] * weight[:1]
    for j, tap in enumerate(taps[1:], 1):
        y = y + tap * weight[j : j + 1]
    return activations.activate(y if bias is None else y + bias, s.activation)


def gate(g: jax.Array, A_log: Any, dt_bias: Any, s: DecodeStatic) -> jax.Array:
    """Return gates [n, lanes] as decays in nats; with a law, which takes A_log and dt_bias, the gates are raw."""
    return g if s.law is None else s.law.decay(g, *s.law.in_range(A_log, dt_bias))


def time_steps(raw: jax.Array, dt_bias: jax.Array, s: DecodeStatic) -> jax.Array:
    """Return the time steps of Mamba-2 of raw steps [n, HV]."""
    assert s.dt_limit is not None
    least, most = s.dt_limit
    steps = gate_activation.softplus(raw + dt_bias)
    # A softplus is never below 0, so the default limits need no operation.
    steps = steps if least <= 0 else jnp.maximum(steps, jnp.float32(least))
    return steps if most == math.inf else jnp.minimum(steps, jnp.float32(most))


def over_lanes(x: jax.Array, s: DecodeStatic) -> jax.Array:
    """Return a number for each of the value heads that lie side by side, [n, heads], in all lanes of its head."""
    if x.shape[1] == 1:
        return x
    size = (len(x), s.V // s.side_by_side)
    return jnp.concatenate([jnp.broadcast_to(x[:, j : j + 1], size) for j in range(s.side_by_side)], axis=1)


def step_size(beta: jax.Array, s: DecodeStatic) -> jax.Array:
    """Return the final step sizes [n, HV]."""
    return beta if s.step_size is None else s.step_size * jax.nn.sigmoid(beta)


def by_token(x: jax.Array, s: DecodeStatic) -> list[jax.Array]:
    """Return the rows of each token of decodes, [n, lanes] each: the rows of a token are one after the other."""
    if s.decode_tokens == 1:
        return [x]
    n = len(x) // s.decode_tokens
    return [x[t * n : (t + 1) * n] for t in range(s.decode_tokens)]


def accumulate(g: jax.Array, s: DecodeStatic) -> jax.Array:
    """Return the sums of gates from the first token of each decode to each of its tokens."""
    return jnp.concatenate(list(itertools.accumulate(by_token(g, s), jnp.add)))


def accumulate_before(g: jax.Array, s: DecodeStatic) -> jax.Array:
    """Return the sums of gates from the first token of each decode to the token before each of its tokens."""
    parts = by_token(g, s)
    return jnp.concatenate(list(itertools.accumulate(parts[:-1], jnp.add, initial=jnp.zeros_like(parts[0]))))


def run_rule(q, keys, v, g, beta, erase, S_e, S_q, s: DecodeStatic) -> tuple[list[jax.Array], jax.Array]:
    """Return the values that tokens write by each of their keys, and their outputs, [rows, V] for a value head.

    Args:
      q, v: queries and values of the head.
      keys: its keys, and where there are some, the keys that write what erase keys read.
      g: its gates in nats, [rows, 1] or [rows, K], or where value heads lie side by side [rows, V].
      beta: step sizes [rows, 1], or None without the delta rule.
      erase: erase keys, which may be k.
      S_e, S_q: the values that erase keys and queries read from the state before the tokens of the decode, with all
        decays.
      s: the static description.
    """
    q, v, g, erase, S_e, S_q = (by_token(x, s) for x in (q, v, g, erase, S_e, S_q))
    keys = list(zip(*(by_token(x, s) for x in keys), strict=True))
    written, outputs = [], []
    for t in range(s.decode_tokens):
        found, since, earlier = [S_e[t], S_q[t]], None, None
        for u in reversed(range(t)):
            # The decay up to the token before, for erase keys that read before the decay of their token.
            if u < t - 1:
                earlier = g[u + 1] if earlier is None else earlier + g[u + 1]
            since = g[u + 1] if since is None else since + g[u + 1]
            until = earlier if s.erase_before_decay else since
            for (j, (x, nats)), (key, value) in itertools.product(
                enumerate(((erase[t], until), (q[t], since))), zip(keys[u], written[u], strict=True)
            ):
                if nats is not None and s.side_by_side > 1 and not s.paired:
                    value = jnp.exp(nats) * value
                elif nats is not None:
                    key = jnp.exp(nats) * key
                found[j] = found[j] + sum_of_head(x * key, s) * value
        new = v[t] if beta is None else by_token(beta, s)[t] * (v[t] - found[0])
        written.append([new, found[0]][: len(keys[t])])
        # The state after the token is read without it: o = a S^T q + (k . q) new.
        for key, value in zip(keys[t], written[t], strict=True):
            found[1] = found[1] + sum_of_head(q[t] * key, s) * value
        outputs.append(found[1])
    return [jnp.concatenate(of_key) for of_key in zip(*written, strict=True)], jnp.concatenate(outputs)


def norm_heads(
    o: jax.Array, z: jax.Array, weight: jax.Array | None, added: jax.Array | None, s: DecodeStatic,
    mean_of=lambda x: jnp.mean(x, axis=1, keepdims=True),
) -> jax.Array:  # fmt: skip
    """Return the norm of the heads of an output [n, lanes] that have one norm, gated; without a weight only gated.

    With an array that is added to the norm it is a layer norm. `mean_of` returns the mean in the lanes of a norm.
    """
    gate = activations.activate(z, s.norm_gate)
    if weight is None:
        return o * gate
    o = o * gate if s.gate_first else o
    o = o if added is None else o - mean_of(o)
    y = weight * (o * lax.rsqrt(mean_of(o * o) + jnp.float32(s.eps)))
    y = y if added is None else y + added
    return y if s.gate_first else y * gate


def row_of(h: int, s: DecodeStatic) -> int:
    """Return the row of value head h in the order [R, H] of rings: value head k R + r is in row r H + k."""
    return h % s.group * s.H + h // s.group


def by_row(x, s: DecodeStatic) -> list:
    """Return a list over value heads in the order of these rows."""
    return [x[h] for h in sorted(range(s.HV), key=lambda h: row_of(h, s))]


def exact_parts(x: jax.Array) -> list[jax.Array]:
    """Return float32 numbers that bfloat16 holds exactly, and whose sum is x."""
    found = []
    for _ in range(PARTS - 1):
        # These are the first 8 digits. A conversion to bfloat16 and back would find them, too, but a compiler may drop
        # it.
        bits = lax.bitwise_and(lax.bitcast_convert_type(x, jnp.uint32), jnp.uint32(0xFFFF0000))
        found.append(lax.bitcast_convert_type(bits, jnp.float32))
        x = x - found[-1]
    return [*found, x]


def lower_lanes(x: jax.Array) -> jax.Array:
    """Return which lanes of x [n, lanes] belong to the first one of two heads, bool."""
    return lax.broadcasted_iota(jnp.int32, x.shape, 1) < jnp.int32(x.shape[1] // 2)


def in_halves(x: jax.Array) -> list[jax.Array]:
    """Return x [n, lanes] with zeros in the place of one of two heads, and of the other."""
    lower, zero = lower_lanes(x), jnp.zeros_like(x)
    return [jnp.where(lower, x, zero), jnp.where(lower, zero, x)]


def sum_of_head(x: jax.Array, s: DecodeStatic) -> jax.Array:
    """Return the sum over the channels of a head, [n, 1], or of two heads in the lanes of each, [n, lanes]."""
    sums = [jnp.sum(y, axis=1, keepdims=True) for y in (in_halves(x) if s.paired else [x])]
    return jnp.where(lower_lanes(x), sums[0], sums[1]) if s.paired else sums[0]


def read_on_matrix_unit(S: jax.Array, rows: jax.Array, s: DecodeStatic) -> jax.Array:
    """Return rows [n, K] of bfloat16 numbers times a state [K, V], or transposed [V, K], float32 [n, V]."""
    n, rows = len(rows), jnp.concatenate(in_halves(rows)) if s.paired else rows
    parts = exact_parts(S) if S.dtype == jnp.float32 else [S]
    products = [
        lax.dot_general(
            rows.astype(jnp.bfloat16), x.astype(jnp.bfloat16), (((1,), (int(s.transposed),)), ((), ())),
            preferred_element_type=jnp.float32,
        )
        for x in parts
    ]  # fmt: skip
    y = functools.reduce(jnp.add, products[::-1])
    return jnp.concatenate([y[:n], y[n:]], axis=1) if s.paired else y


def read_on_vector_unit(S: jax.Array, row: jax.Array) -> jax.Array:
    """Return a row [1, K] times a state [K, V], float32 [1, V]."""
    return jnp.sum(S * tiles.to_column(row[None])[0], axis=0, keepdims=True)


def next_state(S: jax.Array, decay: jax.Array, keys: list, made: list, s: DecodeStatic) -> jax.Array:
    """Return diag(decay) S and the products k n^T of keys and what they write, in float32.

    Args:
      S: the state [K, V], or [V, K] if states lie transposed.
      decay: [1, 1] or [1, K], or [1, heads] where value heads lie side by side.
      keys: [K, 1], or [1, K] if states lie transposed.
      made: [1, V] for each of them.
      s: the static description.
    """
    if not s.transposed:
        decay = decay if decay.shape[1] == 1 else tiles.to_column(decay[None])[0]
        return sum((key * new for key, new in zip(keys, made, strict=True)), start=decay * S)
    if s.side_by_side > 1 and not s.paired:
        size = s.V // s.side_by_side
        S = jnp.concatenate([decay[:, j : j + 1] * S[j * size : (j + 1) * size] for j in range(s.side_by_side)])
    else:
        S = decay * S
    return S + _outer(made, keys, s)


def _outer(columns: list[jax.Array], rows: list[jax.Array], s: DecodeStatic) -> jax.Array:
    """Return the sum of the products of rows [1, V], as columns, and rows [1, K], [V, K], exact as float32 is.

    The matrix unit multiplies every part of one by every part of the other, which lie in rows.
    """
    spread = lambda parts, place: functools.reduce(
        lambda rest, j: jnp.where(place == jnp.int32(j), parts[j], rest), range(PARTS), jnp.float32(0.0)
    )
    # A ninth product would be that of the last parts, which float32 does not hold beside the first one.
    size = 16 if len(rows) == 1 and not s.paired else 8
    index = lambda x: lax.broadcasted_iota(jnp.int32, (size, x.shape[1]), 0)
    left = [spread(exact_parts(x), lax.div(index(x), jnp.int32(PARTS))) for x in columns]
    right = [spread(exact_parts(x), lax.rem(index(x), jnp.int32(PARTS))) for x in rows]
    if s.paired:
        left = [half for x in left for half in (x[:, : s.V // 2], x[:, s.V // 2 :])]
        right = [half for x in right for half in in_halves(x)]
    left, right = (jnp.concatenate(x).astype(jnp.bfloat16)[None] for x in (left, right))
    return matmul.dot_tn(left, right)[0]


def stored(state: jax.Array, dtype, transposed: bool = False) -> tuple[jax.Array, jax.Array | None]:
    """Return a float32 state in the type of a pool, and its scales [1, K], None unless it is int8."""
    if dtype != jnp.int8:
        return state.astype(dtype), None
    state, scales = state_pool.quantize(state, -2 if transposed else -1)
    return state.astype(dtype), scales if transposed else tiles.to_row(scales[None])[0]
