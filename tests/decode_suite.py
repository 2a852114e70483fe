"""Decodes of a layer of every kind, for the kernel that does them in one launch, and the same in float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from chunkwise.shared.call.arguments import Slots
from chunkwise.shared.call.gates import GateActivation
from chunkwise.shared.serving import state_pool
from chunkwise.shared.serving.decode import launch
from chunkwise.shared.serving.decode.records import Decodes, static_of
from chunkwise.shared.serving.state_pool import StatePool
from chunkwise.shared.testing import conv_norm_oracle, oracle
from chunkwise.shared.testing.compare import TOLERANCE

W, SLOTS, EPS = 4, 20, 1e-5
# The largest errors by type. In int8 a row is rounded to multiples of its largest number over 127.
LIMITS = TOLERANCE | dict(int8=0.01)
# Tokens of a ring, and how many of them the slots hold: none, some, and all.
L = 4
COUNTS = np.array([0, 1, 4, 2, 3, 0, 2, 4, 1, 3, 0, 2, 3, 1, 4, 2, 0, 1, 4, 3], np.int32)
# The slots of twelve sequences: none, past the end, and one after the last decode. The fourth has no token, and the
# sixth starts from zeros.
NAMED = np.array([7, -1, 3, 4, SLOTS, 15, 0, 12, 1, 18, 9, 5], np.int32)
LENGTHS = np.array([1, 1, 1, 0, 1, 1, 1, 1, 1, 1, 1, 1])
CONTINUES = np.arange(len(NAMED)) != 5
DECODES = 11


def boundaries(tokens: int = 1) -> np.ndarray:
    """Return the boundaries of sequences of at most `tokens` tokens."""
    return np.cumsum([0, *(LENGTHS * (1 + np.arange(len(NAMED)) % tokens))]).astype(np.int32)


def drafts(tokens: int) -> np.ndarray:
    """Return how many tokens of each ring came from the last decode."""
    return np.minimum(COUNTS, tokens)


def accepted(tokens: int) -> np.ndarray:
    """Return how many of these tokens are kept: all, or all but one in every other slot."""
    return np.maximum(drafts(tokens) - np.arange(SLOTS) % 2, 1).astype(np.int32)


def named(token: int) -> np.ndarray:
    """Return the slots of the states after a token of the sequences, without rings."""
    past = np.where(NAMED < 0, NAMED, 99)
    return np.where((NAMED >= 0) & (NAMED < SLOTS), NAMED + SLOTS * token, past).astype(np.int32)


def columns(tokens: int) -> np.ndarray:
    """Return which of its slots each sequence starts from, without rings: two of them start from none."""
    column = np.arange(len(NAMED)) % tokens
    column[[3, 8]] = -1, tokens
    return column


def slots(tokens: int = 1, ring: bool = True) -> Slots:
    """Return the slots of the step: over rings one for each sequence, otherwise one for each of its tokens."""
    indices, kept = NAMED, None if tokens == 1 else accepted(tokens)[NAMED % SLOTS]
    if tokens > 1 and not ring:
        indices, kept = np.stack([named(t) for t in range(tokens)], axis=1), columns(tokens).astype(np.int32) + 1
    return Slots(
        jnp.asarray(indices), jnp.asarray(CONTINUES), num_accepted_tokens=None if kept is None else jnp.asarray(kept),
        num_decodes=jnp.int32(DECODES), num_sequences=jnp.int32(len(NAMED)),
    )  # fmt: skip


def written(tokens: int = 1, ring: bool = True) -> list[int]:
    """Return the slots that the step writes."""
    counts = np.diff(boundaries(tokens))[:DECODES]
    found = [(named(t), counts > t) for t in range(1 if ring else tokens)]
    return [slot for places, has in found for slot in places[:DECODES][has] if 0 <= slot < SLOTS * tokens]


def make(
    H: int, HV: int, *, per_channel=False, together=False, bias=False, dtype=jnp.float32, pool=jnp.float32, ring=False,
    tokens=1, size=128,
):  # fmt: skip
    """Return decodes of 12 sequences, and their pools of the convolution and of states, whose slots have rings or none.

    Heads have `size` channels of keys and of values. A decode has at most `tokens` tokens. Without rings each of them
    has a slot, so that there are more slots.
    """
    rng, T, K, V = np.random.default_rng(0), len(NAMED) * tokens, size, size
    draw = lambda *shape, kind=dtype, size=1.0: jnp.asarray(size * rng.standard_normal(shape), kind)
    channels = [2 * H * K + HV * V] if together else [H * K, H * K, HV * V]
    gates = HV * K if per_channel else HV
    activation = GateActivation(True, -5.0 if bias else None, use_beta_sigmoid_in_kernel=True, allow_neg_eigval=bias)
    decodes = Decodes(
        static_of(H, HV, K, V, activation)._replace(W=tokens, norm_gate="silu", eps=EPS),
        tuple(draw(T, n) for n in channels), draw(T, gates), draw(T, HV), draw(T, HV * V),
        tuple(draw(n, W) for n in channels), tuple(draw(n) for n in channels) if bias else (),
        draw(HV, kind=jnp.float32, size=0.5), draw(*((HV, K) if per_channel else (HV,)), kind=jnp.float32), draw(V),
    )  # fmt: skip
    conv = tuple(draw(SLOTS * tokens, W - 1, n, size=0.5) for n in channels)
    count = SLOTS if ring else SLOTS * tokens
    states = state_pool.make_pool(count, HV, K, V, pool, replay=L if ring else 0, H=H, per_channel=per_channel)
    states = state_pool.write_states(states, jnp.arange(count, dtype=jnp.int32), draw(count, HV, K, V, size=0.3))
    return decodes, conv, _with_rings(states, draw, tokens) if ring else states


def _with_rings(pool: StatePool, draw, last: int) -> StatePool:
    """Return a pool whose rings hold `COUNTS` tokens, and NaN where there is none."""
    exists = jnp.asarray(np.arange(L) < COUNTS[:, None])
    drawn = lambda y, size: draw(*y.shape, kind=y.dtype, size=size)
    size = pool.shape[2] ** -0.5
    tokens = dict(keys=drawn(pool.keys, size), writes=drawn(pool.writes, 0.5), gates=-abs(drawn(pool.gates, 0.3)))
    tokens = {n: jnp.where(exists.reshape(SLOTS, L, *[1] * (y.ndim - 2)), y, jnp.nan) for n, y in tokens.items()}
    return pool._replace(**tokens, count=jnp.asarray(COUNTS), drafts=jnp.asarray(drafts(last)))


def all_states(pool: StatePool, kept=None):
    """Return the states of all slots with the tokens of their rings that are kept."""
    return state_pool.read_states(pool, jnp.arange(pool.shape[0], dtype=jnp.int32), kept)


def states_after(decodes: Decodes, pool: StatePool):
    """Return the states after a step, whose tokens are all kept."""
    tokens = decodes.static.decode_tokens
    if tokens == 1 or not pool.replay:
        return all_states(pool)
    kept = accepted(tokens)
    for slot, count in zip(NAMED[:DECODES], np.diff(boundaries(tokens)), strict=False):
        if count and 0 <= slot < SLOTS:
            kept[slot] = count
    return all_states(pool, jnp.asarray(kept))


def states_before(decodes: Decodes, pool: StatePool):
    """Return the states from which a step starts."""
    tokens = decodes.static.decode_tokens
    return all_states(pool, None if tokens == 1 or not pool.replay else jnp.asarray(accepted(tokens)))


@functools.cache
def _program(static):
    return jax.jit(lambda decodes, *args: launch.launch(decodes._replace(static=static), *args))


def decode(decodes: Decodes, conv, pool, bounds=None, named: Slots | None = None):
    """Run the step by the kernel; decodes of the same sizes share a program."""
    arrays, tokens = decodes._replace(static=None), decodes.static.decode_tokens
    bounds = jnp.asarray(boundaries(tokens) if bounds is None else bounds, jnp.int32)
    return _program(decodes.static)(
        arrays, conv, pool, bounds, slots(tokens, pool.replay > 0) if named is None else named
    )


def decay_of(decodes: Decodes, g, A_log, dt_bias):
    """Return the decays in nats of raw gates [T, HV, 1 or K]."""
    a, x, law = np.exp(A_log)[:, None], g + dt_bias, decodes.static.law
    return law.lower_bound * conv_norm_oracle.activation(a * x, "sigmoid") if law.bounded else -a * np.logaddexp(x, 0.0)


def reference(decodes: Decodes, conv, states, read=NAMED):
    """Return the output [T, HV V], the pools of convolutions and the states of the step in float64.

    `read` has the slots that sequences start from. Inputs of convolutions that no later step reads are NaN. There are
    rings if tokens share a slot of the states.
    """
    s, m = decodes.static, jax.tree.map(lambda y: np.asarray(y, np.float64), decodes._replace(static=None))
    conv, states, U = [np.array(y, np.float64) for y in conv], np.array(states, np.float64), s.decode_tokens
    bounds, last = boundaries(U), (accepted(U) if U > 1 else np.ones(SLOTS, int)) - 1
    ring = len(states) == SLOTS
    o = np.zeros((len(decodes.x[0]), s.HV * s.V))
    for n in range(DECODES):
        t, stop = bounds[n : n + 2]
        if t == stop:
            continue
        by_head = lambda x, heads, T=stop - t: x.reshape(1, T, heads, -1)
        slot, source = (x if 0 <= x < SLOTS else None for x in (NAMED[n], read[n]))
        starts = source is None or not CONTINUES[n]
        if not ring:
            # One of the slots of the sequence, from a number that is one of theirs.
            starts |= not 0 <= columns(U)[n] < U
            source = None if starts else source + SLOTS * columns(U)[n]
        inputs = None if starts else source * U + last[source] if ring else source
        before = [np.zeros(y.shape[1:]) if starts else y[inputs] for y in conv]
        taps = [np.concatenate([rows, x[t:stop]]) for rows, x in zip(before, m.x, strict=True)]
        windows = lambda rows: np.stack([rows[i : i + W] for i in range(len(rows) - W + 1)])
        y = [np.sum(windows(x) * w.T, axis=1) for x, w in zip(taps, m.weight, strict=True)]
        y = [x + b for x, b in zip(y, m.bias, strict=True)] if m.bias else y
        y = conv_norm_oracle.activation(np.concatenate(y, axis=1), "silu")
        q, k, v = np.split(y, [s.H * s.K, 2 * s.H * s.K], axis=1)
        g = decay_of(decodes, by_head(m.g[t:stop], s.HV), m.A_log, m.dt_bias.reshape(s.HV, -1))
        beta = s.step_size * conv_norm_oracle.activation(m.beta[t:stop], "sigmoid")
        first = np.zeros((1, *states.shape[1:])) if starts else states[source][None]
        arrays = by_head(q, s.H), by_head(k, s.H), by_head(v, s.HV), g if g.shape[3] > 1 else g[..., 0], beta[None]

        def run(T, arrays=arrays, first=first):
            cut = (x[:, :T] for x in arrays)
            return oracle.reference(*cut, initial_state=first, use_qk_l2norm_in_kernel=True)

        out, after = run(stop - t)
        out = conv_norm_oracle.rms_norm_gated(out[0], by_head(m.z[t:stop], s.HV)[0], m.norm, eps=EPS)
        o[t:stop] = out.reshape(stop - t, -1)
        if slot is None:
            continue
        if not ring:
            for u in range(stop - t):
                states[slot + SLOTS * u] = run(u + 1)[1][0]
                for pool, rows in zip(conv, taps, strict=True):
                    pool[slot + SLOTS * u] = windows(rows)[u, 1:]
        else:
            states[slot] = after[0]
            for pool, rows in zip(conv, taps, strict=True):
                pool[slot * U : (slot + 1) * U] = np.nan
                pool[slot * U : slot * U + stop - t] = windows(rows)[:, 1:]
    return o, conv, states
