"""The laws that make decays of raw gates, in float32; arrays in, arrays out.

With x the raw gate, a = exp(A_log) and b = dt_bias, a decay in nats is

    g = -a softplus(x + b)                  dx = -a sigmoid(x + b) dg      dA_log = sum g dg       db = sum dx
    g = lower_bound sigmoid(u)              dx = a du                      dA_log = sum u du       db = sum dx
        u = a (x + b)                       du = g (1 - sigmoid(u)) dg
"""

import jax
import jax.numpy as jnp


def decay(
    x: jax.Array, A_log: jax.Array, dt_bias: jax.Array, lower_bound: float | None, unit: float = 1.0, exact: bool = True
) -> jax.Array:
    """Return the decay of raw gates x; all float32 and of shapes that fit one another.

    Args:
      x, A_log, dt_bias, lower_bound: of the law.
      unit: the result is in nats times this.
      exact: decays are as exact where they are weak as where they are strong. Else all are exact up to 6e-8 exp(A_log)
        nats, which takes fewer operations.
    """
    a, x = jnp.exp(A_log), x + dt_bias
    if lower_bound is not None:
        return (unit * float(lower_bound)) * jax.nn.sigmoid(a * x)
    return (-unit * a) * (_softplus(x) if exact else _softplus_of_few_operations(x))


def decay_gradient(
    x: jax.Array, A_log: jax.Array, dt_bias: jax.Array, lower_bound: float | None, dg: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Return the gradients of `decay` for that of its result: of x, and of A_log before its sum over tokens."""
    a, y = jnp.exp(A_log), x + dt_bias
    if lower_bound is None:
        return -a * jax.nn.sigmoid(y) * dg, decay(x, A_log, dt_bias, None) * dg
    u = a * y
    open_ = jax.nn.sigmoid(u)
    du = float(lower_bound) * open_ * (1.0 - open_) * dg
    return a * du, u * du


def _softplus(x: jax.Array) -> jax.Array:
    """Return log(1 + e^x); neither does e^x overflow, nor is a small one lost beside 1."""
    return jnp.maximum(x, 0.0) + jnp.log1p(jnp.exp(-jnp.abs(x)))


def _softplus_of_few_operations(x: jax.Array) -> jax.Array:
    """Return log(1 + e^x): a small e^x loses digits beside 1, and where it would overflow x itself is the result."""
    return jnp.maximum(x, jnp.log(1.0 + jnp.exp(jnp.minimum(x, 80.0))))
