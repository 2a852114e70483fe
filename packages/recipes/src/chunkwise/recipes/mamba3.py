"""Mamba-3 with one input and one output: simple gated linear attention over tokens that are weighed twice.

A token is written half when it comes and half with the next one, before the decay. So simple gated linear attention
writes it whole, with the weights of both, and the output gives back what is not yet there.
"""

import functools
import math
from typing import Any, NamedTuple, Unpack

import jax
import jax.numpy as jnp

from chunkwise.fused_gla import chunk_gla, chunk_simple_gla, recurrent_simple_gla
from chunkwise.recipes import sequences
from chunkwise.shared.call import checks, forms, shapes, signature
from chunkwise.shared.testing import inputs
from chunkwise.shared.testing.definitions import Composition, TokenRule, read, write


class Mamba3State(NamedTuple):
    """The state of N sequences.

    Attributes:
      S: [N, H, K, V] float32.
      angle: [N, H, R] float32, by how much keys are rotated, in radians.
      k, v: [N, H, K] and [N, H, V] float32, the rotated key and the value of the last token.
    """

    S: jax.Array
    angle: jax.Array
    k: jax.Array
    v: jax.Array


def _run(run, named: dict[str, Any]) -> tuple[jax.Array, Any]:
    by_head: Any = dict.fromkeys(("g", "dt", "trap"), "B T H")
    sizes = shapes.check_arrays(named, q="B T H K", k="B T H K", v="B T H V", **by_head, angles="B T H R")
    R, K = sizes["R"], sizes["K"]
    checks.check(2 * R <= K, f"`angles` must have at most K / 2 channels; got {R} for K = {K}.")
    tokens = sequences.find(sizes, named)
    parts = dict(S="N H K V", angle="N H R", k="N H K", v="N H V")
    shapes.check_parts(named["initial_state"], Mamba3State, sizes | {"N": tokens.rows.shape[0]}, **parts)
    wide = {name: tokens.select(jnp.asarray(named[name], jnp.float32)) for name in (*by_head, "q", "k", "v", "angles")}
    state, dt, trap, v = named["initial_state"], wide["dt"], wide["trap"], wide["v"]
    start = None if state is None else Mamba3State(*(jnp.asarray(y, jnp.float32) for y in state))
    angle, (q, k) = rotate(tokens, wide["angles"], None if start is None else start.angle, wide["q"], wide["k"])
    late = (1 - trap) * dt
    S = None if start is None else start.S + tokens.at_start(late)[..., None, None] * write(start.k, start.v)
    weight = (trap * dt + tokens.after(late))[..., None]
    names = "scale", "output_final_state", "cu_seqlens", "segment_ids", "chunk_size", "implementation", "sharding"
    options = {name: named[name] for name in names if name in named}
    dtype = named["v"].dtype
    o, S = run(q.astype(dtype), k.astype(dtype), (weight * v).astype(dtype), wide["g"], initial_state=S, **options)
    scale = sizes["K"] ** -0.5 if named["scale"] is None else jnp.asarray(named["scale"], jnp.float32)
    missing = (tokens.after(late) * jnp.sum(q * k, axis=3))[..., None] * v
    o = (o.astype(jnp.float32) - scale * missing).astype(dtype)
    if S is None:
        return o, None
    none: Any = Mamba3State(*[jnp.zeros(())] * 4) if start is None else start
    ends = (tokens.at_end(y, old) for y, old in ((angle, none.angle), (k, none.k), (v, none.v)))
    return o, Mamba3State(S, *ends)


# 2 pi in two parts: small multiples of the first are exact.
_TURN = 6.28125, 2 * math.pi - 6.28125


def _fold(angle: jax.Array) -> jax.Array:
    """Return an angle without whole turns, so that a sum keeps its digits."""
    turns = jnp.round(angle / (2 * math.pi))
    return (angle - turns * _TURN[0]) - turns * _TURN[1]


def rotate(tokens: sequences.Neighbours, angles, initial, *keys: jax.Array) -> tuple[jax.Array, list[jax.Array]]:
    """Return the angles [B, T, H, R] up to every token, and the keys with pairs of channels turned by them."""
    angle = tokens.accumulate(jnp.ones_like(angles), angles, initial, _fold)
    cos, sin = (part(angle)[..., None] for part in (jnp.cos, jnp.sin))
    turned, n = [], 2 * angle.shape[3]
    for y in keys:
        a, b = jnp.split(y[..., :n].reshape(*angle.shape, 2), 2, axis=-1)
        pairs = jnp.concatenate([a * cos - b * sin, a * sin + b * cos], axis=-1)
        turned.append(jnp.concatenate([pairs.reshape(*angle.shape[:3], n), y[..., n:]], axis=3))
    return angle, turned


@signature.public_function_by_name(functools.partial(_run, chunk_simple_gla), "chunk", chunk_gla)
def chunk_mamba3(
    q: jax.Array, k: jax.Array, v: jax.Array, g: jax.Array, dt: jax.Array, trap: jax.Array, angles: jax.Array,
    scale: float | None = 1.0, initial_state: Mamba3State | None = None, output_final_state: bool = False,
    **options: Unpack[forms.Whole],
) -> tuple[jax.Array, Mamba3State | None]:  # fmt: skip
    """Mamba-3 with one input and one output over whole sequences, chunk by chunk, differentiable.

        S_t = e^g_t (S_{t-1} + (1 - trap_t) dt_t k_{t-1} v_{t-1}^T) + trap_t dt_t k_t v_t^T
        o_t = scale S_t^T q_t

    Before it, channels 2 i and 2 i + 1 of q and k are turned by the sum of the angles up to their token. The
    final_state is a `Mamba3State`, whose S has the shape above. C, B and x of the paper are q, k and v.

    Args:
      q, k: queries and keys [B, T, H, K], after their norms and biases.
      v: values [B, T, H, V].
      g: log decay [B, T, H] in nats, at most 0: A dt.
      dt: step sizes [B, T, H], at least 0.
      trap: how much of a token is written when it comes [B, T, H], from 0 to 1; 1 is the rule of Mamba-2.
      angles: by how much a token turns [B, T, H, R] in radians, R at most K / 2: pi tanh(y) dt in the model.
      initial_state: the `Mamba3State` before every sequence; None for no tokens before.

    Accuracy: as `chunk_simple_gla`; a sum of angles has the error of its float32 terms.
    Cost: as `chunk_simple_gla`, a scan of the angles, and passes over q, k, v and o.
    Source: Lahoti et al., Mamba-3 (2026).
    """
    ...


@signature.public_function_by_name(functools.partial(_run, recurrent_simple_gla), "recurrent", chunk_mamba3)
def recurrent_mamba3(
    q: jax.Array, k: jax.Array, v: jax.Array, g: jax.Array, dt: jax.Array, trap: jax.Array, angles: jax.Array,
    scale: float | None = 1.0, initial_state: Mamba3State | None = None, output_final_state: bool = False,
    **options: Unpack[forms.FewTokens],
) -> tuple[jax.Array, Mamba3State | None]:  # fmt: skip
    """Mamba-3 with one input and one output token by token, the decode path.

    Accuracy: as `recurrent_simple_gla`.
    Cost: as `recurrent_simple_gla`.
    """
    ...


def _step(state: Any, token: dict[str, jax.Array], scale: float) -> tuple[Any, jax.Array]:
    S, angle, k, v = state
    angle = angle + token["angles"]
    angle = angle - 2 * math.pi * jnp.round(angle / (2 * math.pi))
    turn = lambda y: _turned(y, angle)
    now, dt, trap = turn(token["k"]), token["dt"][:, None, None], token["trap"][:, None, None]
    S = jnp.exp(token["g"])[:, None, None] * (S + (1 - trap) * dt * write(k, v)) + trap * dt * write(now, token["v"])
    return Mamba3State(S, angle, now, token["v"]), scale * read(S, turn(token["q"]))


def _turned(y: jax.Array, angle: jax.Array) -> jax.Array:
    """Return y [H, K], whose first pairs of channels are complex numbers, times e^(i angle)."""
    n = 2 * angle.shape[1]
    z = (y[:, :n:2] + 1j * y[:, 1:n:2]) * jnp.exp(1j * angle)
    return jnp.concatenate([jnp.stack([z.real, z.imag], axis=-1).reshape(-1, n), y[:, n:]], axis=1)


def _inputs(B=1, T=64, H=1, HV=None, K=64, V=64, *, seed=0, num_states=0, **options) -> dict[str, Any]:
    H = HV or H
    x: dict[str, Any] = inputs.make_inputs(B, T, H, H, K, V, seed=seed, num_states=num_states, **options)
    draw = lambda *shape: jax.random.normal(jax.random.key(seed), shape)
    x["trap"], x["dt"] = x.pop("beta").astype(jnp.float32), jax.nn.softplus(draw(B, T, H))
    x["angles"] = math.pi * jnp.tanh(draw(B, T, H, K // 4 or 1))
    if num_states:
        S = x["initial_state"]
        x["initial_state"] = Mamba3State(S, jnp.zeros_like(S[..., : K // 4 or 1, 0]), S[..., 0], S[..., 0, :])
    return x


RECIPE = Composition(
    chunk_mamba3, recurrent_mamba3, "simple_gla",
    TokenRule(
        _step,
        lambda HV, K, V: Mamba3State(
            jnp.zeros((HV, K, V)), jnp.zeros((HV, K // 4 or 1)), jnp.zeros((HV, K)), jnp.zeros((HV, V))
        ),
    ),
    _inputs, scale=1.0, values=(("g", "log decay"), ("dt", (0, math.inf)), ("trap", (0, 1))),
)  # fmt: skip
