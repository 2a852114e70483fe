"""Seeded inputs of operators and stages."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

GATES = ("logsigmoid/10", "logsigmoid", "logsigmoid*10", "logsigmoid*100", "zero", "spikes", "strong")

# Inputs that have no entry for every token.
NOT_TOKENS = ("initial_state", "g_gamma", "A_log", "dt_bias", "A", "D", "u", "log_atk_scale")


def make_gate(kind: str, rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Return log decays of `shape` [B, T, ...] in nats.

    Args:
      kind: one of GATES. "logsigmoid*10" is ten times the log sigmoid of a normal variable; "spikes" is the log
        sigmoid with -30 on every seventh token; "strong" is -30 on every token. Or "resets", for operators only: -1e9
        and -inf in turn on every seventh token, with which a sum of gates would lose all other gates.
      rng: source of randomness.
      shape: shape of the result.
    """
    gate = -np.logaddexp(0.0, rng.standard_normal(shape))
    match kind:
        case "zero":
            return np.zeros(shape)
        case "strong":
            return np.full(shape, -30.0)
        case "spikes":
            gate[:, ::7] = -30.0
            return gate
        case "resets":
            gate[:, ::7], gate[:, 7::14] = -1e9, -np.inf
            return gate
    strength = kind.removeprefix("logsigmoid")
    return gate * (1.0 if not strength else float(strength[1:]) if strength[0] == "*" else 1 / float(strength[1:]))


def make_inputs(
    B=1, T=64, H=1, HV=None, K=64, V=64, *, dtype=jnp.float32, seed=0, gate="logsigmoid", per_channel=False,
    num_states=0, repeat_key=False, beta=None, normalise=True, erase=None,
):  # fmt: skip
    """Return seeded operator inputs: a dict of q, k, v, g, beta and, if asked for, initial_state.

    Args:
      B, T, H, HV, K, V: sizes; HV defaults to H.
      dtype: type of q, k, v and beta; gates and states are float32.
      seed: seed of the generator.
      gate: one of GATES.
      per_channel: gates of shape [B, T, HV, K] instead of [B, T, HV].
      num_states: number of initial states; 0 leaves them out.
      repeat_key: one key for all tokens, which is the worst case for the inverse.
      beta: a constant beta; by default the sigmoid of a normal variable.
      erase: "gate" for b and w, erase and write gates in the place of beta; "key" for erase keys p near the keys.
      normalise: scale keys and queries to unit length, as the models do; without it the delta rule diverges.
    """
    rng = np.random.default_rng(seed)
    HV = HV or H
    unit = (lambda x: x / np.linalg.norm(x, axis=-1, keepdims=True)) if normalise else (lambda x: x)
    q, k = unit(rng.standard_normal((B, T, H, K))), unit(rng.standard_normal((B, T, H, K)))
    if repeat_key:
        k = np.broadcast_to(k[:, :1], k.shape)
    v = rng.standard_normal((B, T, HV, V))
    g = make_gate(gate, rng, (B, T, HV, K) if per_channel else (B, T, HV))
    rate = 1 / (1 + np.exp(-rng.standard_normal((B, T, HV)))) if beta is None else np.full((B, T, HV), beta)
    inputs = {name: jnp.asarray(x, dtype) for name, x in dict(q=q, k=k, v=v, beta=rate).items()}
    inputs["g"] = jnp.asarray(g, jnp.float32)
    if num_states:
        inputs["initial_state"] = jnp.asarray(rng.standard_normal((num_states, HV, K, V)), jnp.float32)
    if erase == "key":
        inputs["p"] = jnp.asarray(unit(k + rng.standard_normal(k.shape) * (0.25 * K**-0.5)), dtype)
    if erase == "gate":
        del inputs["beta"]
        for name, width in dict(b=K, w=V).items():
            gate = 1 / (1 + np.exp(-rng.standard_normal((B, T, HV, width))))
            inputs[name] = jnp.asarray(gate if beta is None or name == "w" else np.full_like(gate, beta), dtype)
    return inputs


def make_delta_inputs(*sizes: int, **options) -> dict[str, jax.Array]:
    """Return inputs of the delta rule: those of `make_inputs` without gates."""
    x = make_inputs(*sizes, **options)
    del x["g"]
    return x


def make_product_inputs(B=1, T=64, H=1, HV=None, K=64, V=64, *, n=2, **options) -> dict[str, jax.Array]:
    """Return inputs of Gated DeltaProduct: those of `make_inputs`, with n keys, values and step sizes a token."""
    x = make_inputs(B, T * n, H, HV, K, V, **options)
    return x | {name: x[name][:, ::n] for name in ("q", "g")}


def make_dplr_inputs(
    B=1, T=64, H=1, HV=None, K=64, V=64, *, dtype=jnp.float32, seed=0, gate="logsigmoid", num_states=0, repeat_key=False
) -> dict[str, jax.Array]:
    """Return inputs of `chunk_dplr_delta_rule`: a has unit length, and b is against it, by rates up to 2 a channel."""
    x = make_inputs(
        B, T, H, HV, K, V, dtype=dtype, seed=seed, gate=gate, per_channel=True, num_states=num_states,
        repeat_key=repeat_key,
    )  # fmt: skip
    rng = np.random.default_rng(seed + 1)
    a, rate = np.asarray(x["k"], np.float64), 2 / (1 + np.exp(-rng.standard_normal(x["k"].shape)))
    written = rng.standard_normal(a.shape) * K**-0.5
    more = {name: jnp.asarray(y, dtype) for name, y in dict(k=written, a=-a, b=rate * a).items()}
    return {name: y for name, y in x.items() if name not in ("g", "beta")} | more | dict(gk=x["g"])


def make_mlstm_inputs(
    B=1, T=64, H=1, HV=None, K=64, V=64, *, dtype=jnp.float32, gate="logsigmoid", num_states=0, **options
) -> dict[str, Any]:
    """Return inputs of `chunk_mlstm`, whose forget gates decay the state by what `gate` says."""
    x: dict[str, Any] = make_inputs(
        B, T, H, HV, K, V, dtype=dtype, gate=gate, num_states=num_states, normalise=False, **options
    )
    rng = np.random.default_rng(2)
    x["i"] = jnp.asarray(rng.standard_normal(x.pop("beta").shape), jnp.float32)
    # The log sigmoid of f is the gate; one of 0 has an f of inf.
    x["f"] = x["g"] - jnp.log(-jnp.expm1(x.pop("g")))
    if num_states:
        C = x["initial_state"]
        x["initial_state"] = C, jnp.asarray(rng.standard_normal(C.shape[:3]), jnp.float32), jnp.zeros(C.shape[:2])
    return x


def make_mamba2_inputs(
    B=1, T=64, H=1, HV=None, K=64, V=64, *, dtype=jnp.float32, seed=0, num_states=0, **options
) -> dict[str, jax.Array]:
    """Return inputs of `chunk_mamba2` with raw step sizes, whose products with the rates A are what `gate` says."""
    x = make_inputs(B, T, H, HV, K, V, dtype=dtype, seed=seed, num_states=num_states, **options)
    rng, HV = np.random.default_rng(seed + 1), HV or H
    A, bias = -np.geomspace(0.5, 4.0, HV), rng.standard_normal(HV)
    dt = np.maximum(np.asarray(x["g"], np.float64) / A, 1e-4)
    # The softplus of it is the step size.
    raw = dt + np.log(-np.expm1(-dt)) - bias
    fixed = {"dt": raw, "A": A, "D": rng.standard_normal((HV, V)), "dt_bias": bias}
    z = jnp.asarray(rng.standard_normal(x["v"].shape), dtype)
    named = {"x": x["v"], "B": x["k"], "C": x["q"], "z": z} | {n: jnp.asarray(y, jnp.float32) for n, y in fixed.items()}
    return named | ({"initial_state": x["initial_state"]} if num_states else {})


def poison_padding(
    inputs: dict[str, jax.Array],
    cu_seqlens: jax.Array | None = None,
    segment_ids: np.ndarray | jax.Array | None = None,
) -> dict[str, jax.Array]:
    """Return the inputs of an operator with NaN in the padding of a packed batch or of segments."""
    T = min(x.shape[1] for name, x in inputs.items() if name not in NOT_TOKENS)
    if segment_ids is not None:
        padding = np.asarray(segment_ids) < 0
    elif cu_seqlens is not None:
        padding = np.arange(T)[None] >= int(cu_seqlens[-1])
    else:
        return inputs
    # An array may have several entries for a token.
    poison = lambda x: x.at[np.repeat(padding, x.shape[1] // T, axis=1)].set(jnp.nan)
    return {name: x if name in NOT_TOKENS else poison(x) for name, x in inputs.items()}


def spec(*shape: int, dtype=jnp.float32) -> jax.ShapeDtypeStruct:
    """Return the shape and type of an array, to be checked or compiled for without data."""
    return jax.ShapeDtypeStruct(shape, dtype)


def boundaries(*lengths: int) -> jax.Array:
    """Return cu_seqlens int32 [N + 1] of sequences of these lengths."""
    return jnp.asarray(np.cumsum([0, *lengths]), jnp.int32)
