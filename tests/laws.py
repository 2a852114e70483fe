"""Raw gates and step sizes, and the oracle of their laws and activations: float64 numpy, with gradients."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np


def raw_inputs(
    x: dict[str, jax.Array], seed: int = 3, dtype=jnp.float32, A_log: tuple[float, ...] | None = None
) -> dict[str, jax.Array]:
    """Return inputs of a delta rule whose gates and step sizes are replaced by raw ones of a type, A_log and dt_bias.

    Raw gates reach from -10 to 10: some tokens forget nearly nothing, others nearly everything. If `A_log` is given,
    the biases are chosen so that this still holds.
    """
    rng, heads = np.random.default_rng(seed), x["g"].shape[2:]
    found = _raw(x, rng, heads, dtype)
    if A_log is None:
        return found
    rates = jnp.asarray(A_log, jnp.float32)
    return found | dict(A_log=rates, dt_bias=found["dt_bias"] - rates.reshape(-1, *(1,) * (len(heads) - 1)))


def _raw(x: dict[str, jax.Array], rng: np.random.Generator, heads: tuple[int, ...], dtype) -> dict[str, jax.Array]:
    return x | dict(
        g=jnp.asarray(rng.uniform(-10, 10, x["g"].shape), dtype),
        **{name: jnp.asarray(rng.standard_normal(x[name].shape), dtype) for name in ("b", "w", "beta") if name in x},
        A_log=jnp.asarray(rng.uniform(-3, 1, heads[:1]), jnp.float32),
        dt_bias=jnp.asarray(rng.standard_normal(heads), jnp.float32),
    )


# The inputs that a law does not read, the step sizes among them.
NO_LAW = ("q", "k", "v", "beta")


def strong_raw_inputs(x: dict[str, jax.Array], strength: float, dtype=jnp.float32) -> dict[str, jax.Array]:
    """Return inputs with raw gates of a strength, and keys that are all alike, so that pairs of tokens score high."""
    normal = np.random.default_rng(1).standard_normal
    keys = np.abs(normal(x["k"].shape))
    x = {name: y.astype(dtype) for name, y in x.items()}
    x["k"] = jnp.asarray(keys / np.linalg.norm(keys, axis=-1, keepdims=True), dtype)
    heads = x["g"].shape[2:]
    raw = dict(g=strength * normal(x["g"].shape), A_log=0.5 * normal(heads[0]), dt_bias=np.zeros(heads))
    return x | {name: jnp.asarray(y, jnp.float32) for name, y in raw.items()}


def _softplus(x, a, lower_bound):
    decay = -a * np.logaddexp(x, 0.0)
    return decay, -a * np.exp(-np.logaddexp(0.0, -x)), decay


def _sigmoid(x, a, lower_bound):
    open_ = np.exp(-np.logaddexp(0.0, -a * x))
    slope = lower_bound * open_ * (1 - open_) * a
    return lower_bound * open_, slope, slope * x


# Functions from x + dt_bias, exp(A_log) and the bound to the decay and its derivatives by x and by A_log.
LAWS = {"softplus": _softplus, "sigmoid": _sigmoid}


def law_reference(
    g, beta, A_log, dt_bias, *, lower_bound: float | None = None, allow_neg_eigval: bool = False, law: str | None = None
) -> tuple[dict[str, np.ndarray], Callable[[np.ndarray, np.ndarray], dict[str, np.ndarray]]]:
    """Return the decays g and step sizes beta, and a function from gradients of both to gradients of the arguments.

    Args:
      g: raw gates [B, T, HV] or [B, T, HV, K].
      beta: raw step sizes [B, T, HV].
      A_log: [HV].
      dt_bias: [HV] or [HV, K].
      lower_bound: the bound of the law "sigmoid"; None for "softplus".
      allow_neg_eigval: double the step sizes.
      law: a name in `LAWS`; None for the law that follows from lower_bound.
    """
    x, beta, A_log, dt_bias = (np.asarray(y, np.float64) for y in (g, beta, A_log, dt_bias))
    a = np.exp(A_log).reshape(-1, *(1,) * (x.ndim - 3))
    x, rate = x + dt_bias, (2.0 if allow_neg_eigval else 1.0) / (1 + np.exp(-beta))
    decay, slope, power = LAWS[law or ("softplus" if lower_bound is None else "sigmoid")](x, a, lower_bound)

    def pull(dg: np.ndarray, dbeta: np.ndarray) -> dict[str, np.ndarray]:
        per_head = np.sum(power * dg, axis=(0, 1))
        return dict(
            g=slope * dg,
            beta=dbeta * rate * (1 - rate / (2.0 if allow_neg_eigval else 1.0)),
            A_log=per_head.reshape(len(A_log), -1).sum(axis=1),
            dt_bias=np.sum(slope * dg, axis=(0, 1)),
        )

    return dict(g=decay, beta=rate), pull
