"""A mixer of a decode in float64, and decodes of every kind for the kernel that does it in one launch."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from chunkwise.shared.call.arguments import Slots
from chunkwise.shared.call.gates import GateActivation
from chunkwise.shared.serving import mixer as mixers
from chunkwise.shared.serving import state_pool
from chunkwise.shared.serving.mixer import Mixer
from chunkwise.shared.serving.mixer_tile import OutputNorm
from chunkwise.shared.serving.state_pool import StatePool
from chunkwise.shared.testing import mixer_oracle, oracle

K = V = 128
W, SLOTS, EPS = 4, 20, 1e-5
# Tokens of a ring, and how many of them the slots hold: none, some, and all.
L = 4
COUNTS = np.array([0, 1, 4, 2, 3, 0, 2, 4, 1, 3, 0, 2, 3, 1, 4, 2, 0, 1, 4, 3], np.int32)
# The slots of twelve sequences: none, past the end, and one after the last decode. The fourth has no token, and the
# sixth starts from zeros.
NAMED = np.array([7, -1, 3, 4, 99, 15, 0, 12, 1, 18, 9, 5], np.int32)
BOUNDARIES = np.array([0, 1, 2, 3, 3, 4, 5, 6, 7, 8, 9, 10, 11], np.int32)
CONTINUES = np.arange(len(NAMED)) != 5
DECODES = 11


def slots() -> Slots:
    """Return the slots of the step."""
    some = jnp.asarray(NAMED)
    return Slots(some, jnp.asarray(CONTINUES), num_decodes=jnp.int32(DECODES), num_sequences=jnp.int32(len(NAMED)))


def make(
    H: int, HV: int, *, per_channel=False, together=False, bias=False, dtype=jnp.float32, pool=jnp.float32, ring=False
):
    """Return a mixer of 12 tokens, and its pools of the convolution and of states, whose slots have rings or none."""
    rng, T = np.random.default_rng(0), len(NAMED)
    draw = lambda *shape, kind=dtype, size=1.0: jnp.asarray(size * rng.standard_normal(shape), kind)
    channels = [2 * H * K + HV * V] if together else [H * K, H * K, HV * V]
    gates = HV * K if per_channel else HV
    activation = GateActivation(True, -5.0 if bias else None, use_beta_sigmoid_in_kernel=True, allow_neg_eigval=bias)
    mixer = Mixer(
        mixers.static_of(H, HV, K, V, activation, OutputNorm("silu", EPS)),
        tuple(draw(T, n) for n in channels), draw(T, gates), draw(T, HV), draw(T, HV * V),
        tuple(draw(n, W) for n in channels), tuple(draw(n) for n in channels) if bias else (),
        draw(HV, kind=jnp.float32, size=0.5), draw(*((HV, K) if per_channel else (HV,)), kind=jnp.float32), draw(V),
    )  # fmt: skip
    conv = tuple(draw(SLOTS, W - 1, n, size=0.5) for n in channels)
    states = StatePool(draw(SLOTS, HV, K, V, kind=pool, size=0.3))
    return mixer, conv, _with_rings(states, H, draw) if ring else states


def _with_rings(pool: StatePool, H: int, draw) -> StatePool:
    """Return a pool whose rings hold `COUNTS` tokens, and NaN where there is none."""
    empty = state_pool.make_pool(*pool.shape, pool.states.dtype, replay=L, H=H)
    exists = jnp.asarray(np.arange(L) < COUNTS[:, None])
    drawn = lambda y, size: draw(*y.shape, kind=y.dtype, size=size)
    tokens = dict(keys=drawn(empty.keys, K**-0.5), writes=drawn(empty.writes, 0.5), gates=-abs(drawn(empty.gates, 0.3)))
    tokens = {n: jnp.where(exists.reshape(SLOTS, L, *[1] * (y.ndim - 2)), y, jnp.nan) for n, y in tokens.items()}
    return empty._replace(states=pool.states, **tokens, count=jnp.asarray(COUNTS), drafts=jnp.minimum(COUNTS, 1))


def all_states(pool: StatePool):
    """Return the states of all slots with the tokens of their rings."""
    return state_pool.read_states(pool, jnp.arange(SLOTS, dtype=jnp.int32))


@functools.cache
def _program(static):
    return jax.jit(lambda mixer, *args: mixers.decode(mixer._replace(static=static), *args))


def decode(mixer: Mixer, conv, pool, boundaries=BOUNDARIES, named: Slots | None = None):
    """Run the step by the kernel; mixers of the same sizes share a program."""
    arrays = mixer._replace(static=None)
    return _program(mixer.static)(
        arrays, conv, pool, jnp.asarray(boundaries, jnp.int32), slots() if named is None else named
    )


def decay_of(mixer: Mixer, g, A_log, dt_bias):
    """Return the decays in nats of raw gates [HV, 1 or K]."""
    a, x, bound = np.exp(A_log)[:, None], g + dt_bias, getattr(mixer.static.law, "lower_bound", None)
    return -a * np.logaddexp(x, 0.0) if bound is None else bound * mixer_oracle.activation(a * x, "sigmoid")


def reference(mixer: Mixer, conv, states, read=NAMED):
    """Return the output [T, HV V], the pools of convolutions and the states of the step in float64.

    `read` has the slots that sequences start from.
    """
    s, m = mixer.static, jax.tree.map(lambda y: np.asarray(y, np.float64), mixer._replace(static=None))
    conv, states = [np.array(y, np.float64) for y in conv], np.array(states, np.float64)
    by_head = lambda x, heads: x.reshape(1, 1, heads, -1)
    o = np.zeros((len(NAMED), s.HV * s.V))
    for n in range(DECODES):
        t, stop = BOUNDARIES[n : n + 2]
        if t == stop:
            continue
        slot, source = (x if 0 <= x < SLOTS else None for x in (NAMED[n], read[n]))
        old = [np.zeros(y.shape[1:]) if source is None or not CONTINUES[n] else y[source] for y in (*conv, states)]
        taps = [np.concatenate([before, x[t][None]]) for before, x in zip(old[:-1], m.x, strict=True)]
        y = [np.sum(x * w.T, axis=0) for x, w in zip(taps, m.weight, strict=True)]
        y = [x + b for x, b in zip(y, m.bias, strict=True)] if m.bias else y
        y = mixer_oracle.activation(np.concatenate(y), "silu")
        q, k, v = np.split(y, [s.H * s.K, 2 * s.H * s.K])
        g = decay_of(mixer, m.g[t].reshape(s.HV, -1), m.A_log, m.dt_bias.reshape(s.HV, -1))
        beta = s.step_size * mixer_oracle.activation(m.beta[t], "sigmoid")
        out, after = oracle.reference(
            by_head(q, s.H), by_head(k, s.H), by_head(v, s.HV), g[None, None] if g.shape[1] > 1 else g.T[None],
            beta[None, None], initial_state=old[-1][None], use_qk_l2norm_in_kernel=True,
        )  # fmt: skip
        out = mixer_oracle.rms_norm_gated(out[0, 0], m.z[t].reshape(s.HV, -1), m.norm, eps=EPS)
        o[t] = out.reshape(-1)
        if slot is not None:
            states[slot] = after[0]
            for pool, rows in zip(conv, taps, strict=True):
                pool[slot] = rows[1:]
    return o, conv, states
