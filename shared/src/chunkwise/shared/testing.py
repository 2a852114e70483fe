"""Seeded inputs, the error metric and its thresholds, for tests, benchmarks and the check command."""

import jax
import jax.numpy as jnp
import numpy as np

# err(x, ref) = RMS(x - ref) / RMS(ref): outputs and states, then gradients.
TOLERANCE = {"float32": 1e-5, "bfloat16": 5e-3}
GRADIENT_TOLERANCE = {"float32": 1e-4, "bfloat16": 8e-3}
GATE_GRADIENT_TOLERANCE = {"float32": 1e-4, "bfloat16": 2e-2}

GATES = ("logsigmoid/10", "logsigmoid", "logsigmoid*10", "logsigmoid*100", "zero", "spikes", "strong")


def make_gate(kind: str, rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Return log decays of `shape` [B, T, ...] in nats.

    Args:
      kind: one of GATES. "logsigmoid*10" is ten times the log sigmoid of a normal variable; "spikes" is the log
        sigmoid with -30 on every seventh token; "strong" is -30 on every token.
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
    strength = kind.removeprefix("logsigmoid")
    return gate * (1.0 if not strength else float(strength[1:]) if strength[0] == "*" else 1 / float(strength[1:]))


def make_inputs(
    B=1, T=64, H=1, HV=None, K=64, V=64, *, dtype=jnp.float32, seed=0, gate="logsigmoid", per_channel=False,
    num_states=0, repeat_key=False, beta=None, normalise=True,
):  # fmt: skip
    """Return seeded operator inputs: a dict of q, k, v, g, beta and, if asked for, initial_state.

    Args:
      B, T, H, HV, K, V: sizes; HV defaults to H.
      dtype: type of q, k, v and beta; gates and states are float32.
      seed: seed of the generator.
      gate: one of GATES.
      per_channel: gates of shape [B, T, HV, K] instead of [B, T, HV].
      num_states: number of initial states; 0 leaves them out.
      repeat_key: one key for all tokens, the worst case of the inverse.
      beta: a constant beta; by default the sigmoid of a normal variable.
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
    return inputs


def error(x, ref) -> float:
    """Return RMS(x - ref) / RMS(ref) in float64; infinity where x is not finite. A zero reference wants exact zeros."""
    x, ref = np.asarray(x, np.float64), np.asarray(ref, np.float64)
    if x.shape != ref.shape or not np.isfinite(x).all():
        return float("inf")
    size = np.sqrt(np.mean(ref**2)) if ref.size else 0.0
    wrong = np.sqrt(np.mean((x - ref) ** 2)) if ref.size else 0.0
    return float(wrong / size) if size > 0 else (0.0 if wrong == 0 else float("inf"))


def assert_close(name: str, x, ref, tolerance: float) -> float:
    """Fail unless error(x, ref) <= tolerance, naming the worst coordinate and both values; return the error."""
    x = np.asarray(jnp.asarray(x).astype(jnp.float32) if isinstance(x, jax.Array) else x, np.float64)
    ref = np.asarray(ref, np.float64)
    assert x.shape == ref.shape, f"{name}: shape {x.shape}, reference {ref.shape}"
    err = error(x, ref)
    if not err <= tolerance:
        distance = np.where(np.isfinite(x), np.abs(x - ref), np.inf)
        worst = np.unravel_index(np.argmax(distance), ref.shape)
        raise AssertionError(
            f"{name}: error {err:.3e} > {tolerance:.1e}; worst at {tuple(int(i) for i in worst)}: "
            f"got {x[worst]:.9g}, reference {ref[worst]:.9g}"
        )
    return err
