"""The mathematics of one token for each of n sequences: rows [n, lanes] of all sequences, and states head by head.

A decode over a ring may have a few tokens. Then the rows of the second tokens come after those of the first, and so on.

No operation mixes rows of different sequences, so NaN and infinity in one sequence change no other sequence.
"""

import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from chunkwise.shared.kernels import activations, tiles
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


def run_rule(q, k, v, g, beta, erase, S_e, S_q, s: DecodeStatic) -> tuple[jax.Array, jax.Array]:
    """Return the values that tokens write, and their outputs, [rows, V] for a value head.

    Args:
      q, k, v: queries, keys and values of the head.
      g: its gates in nats, [rows, 1] or [rows, K].
      beta: step sizes [rows, 1], or None without the delta rule.
      erase: erase keys, which may be k.
      S_e, S_q: the values that erase keys and queries read from the state before the tokens of the decode, with all
        decays.
      s: the static description.
    """
    q, k, v, g, erase, S_e, S_q = (by_token(x, s) for x in (q, k, v, g, erase, S_e, S_q))
    written, outputs = [], []
    for t in range(s.decode_tokens):
        found, since, earlier = [S_e[t], S_q[t]], None, None
        for u in reversed(range(t)):
            # The decay up to the token before, for erase keys that read before the decay of their token.
            if u < t - 1:
                earlier = g[u + 1] if earlier is None else earlier + g[u + 1]
            since = g[u + 1] if since is None else since + g[u + 1]
            key = erased = jnp.exp(since) * k[u]
            if s.erase_before_decay:
                erased = k[u] if earlier is None else jnp.exp(earlier) * k[u]
            for j, (x, y) in enumerate(((erase[t], erased), (q[t], key))):
                found[j] = found[j] + jnp.sum(x * y, axis=1, keepdims=True) * written[u]
        new = v[t] if beta is None else by_token(beta, s)[t] * (v[t] - found[0])
        written.append(new)
        # The state after the token is read without it: o = a S^T q + (k . q) new.
        outputs.append(found[1] + jnp.sum(q[t] * k[t], axis=1, keepdims=True) * new)
    return jnp.concatenate(written), jnp.concatenate(outputs)


def norm_head(o: jax.Array, z: jax.Array, weight: jax.Array, s: DecodeStatic) -> jax.Array:
    """Return the norm of a head of the output [n, V] times the activation of its gate."""
    mean = jnp.mean(o * o, axis=1, keepdims=True)
    return weight * (o * lax.rsqrt(mean + jnp.float32(s.eps))) * activations.activate(z, s.norm_gate)


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


def read_on_matrix_unit(S: jax.Array, rows: jax.Array) -> jax.Array:
    """Return rows [8, K] of bfloat16 numbers times a state [K, V], float32 [8, V]."""
    parts = exact_parts(S) if S.dtype == jnp.float32 else [S]
    products = [
        lax.dot_general(
            rows.astype(jnp.bfloat16), x.astype(jnp.bfloat16), (((1,), (0,)), ((), ())),
            preferred_element_type=jnp.float32,
        )
        for x in parts
    ]  # fmt: skip
    return functools.reduce(jnp.add, products[::-1])


def read_on_vector_unit(S: jax.Array, row: jax.Array) -> jax.Array:
    """Return a row [1, K] times a state [K, V], float32 [1, V]."""
    return jnp.sum(S * tiles.to_column(row[None])[0], axis=0, keepdims=True)


def next_state(S: jax.Array, decay: jax.Array, key_column: jax.Array, new: jax.Array) -> jax.Array:
    """Return diag(decay) S + k n^T in float32, for a decay [1, 1] or [1, K], a key as a column, and n [1, V]."""
    decay = decay if decay.shape[1] == 1 else tiles.to_column(decay[None])[0]
    return decay * S + key_column * new


def stored(state: jax.Array, dtype) -> tuple[jax.Array, jax.Array | None]:
    """Return a float32 state [K, V] in the type of a pool, and its scales [1, K], None unless it is int8."""
    if dtype != jnp.int8:
        return state.astype(dtype), None
    state, scales = state_pool.quantize(state)
    return state.astype(dtype), tiles.to_row(scales[None])[0]
