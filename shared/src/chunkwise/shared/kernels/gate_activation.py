"""The laws that make decays of raw gates, in float32; arrays in, arrays out.

With x the raw gate, a = exp(A_log) and b = dt_bias, a decay in nats is

    g = -a softplus(x + b)                  dx = -a sigmoid(x + b) dg      dA_log = sum g dg       db = sum dx
    g = lower_bound sigmoid(u)              dx = a du                      dA_log = sum u du       db = sum dx
        u = a (x + b)                       du = g (1 - sigmoid(u)) dg

`in_range` moves what would overflow in exp(A_log), so the other functions are exact for every A_log and x + b.
"""

import jax
import jax.numpy as jnp

from chunkwise.shared.kernels import tiles

# The largest A_log that the products of the laws take.
MOST_A_LOG = 40.0
# Below it log(1 + y) loses digits, and three terms of its series do not.
_SMALL = 2.0**-6


def in_range(A_log: jax.Array, dt_bias: jax.Array, lower_bound: float | None) -> tuple[jax.Array, jax.Array]:
    """Return the A_log and dt_bias of a law with the same decays, where exp(A_log) is a number.

    Above 40 the rest of A_log moves into the bias of the first law: softplus(x + b) is e^(x + b) wherever e^A_log of it
    is not more than 110 nats, which is a decay of 0. The second law has u = 0 or is at one of its ends there.
    """
    rest = jnp.maximum(A_log - MOST_A_LOG, 0.0)
    return jnp.minimum(A_log, MOST_A_LOG), dt_bias + rest if lower_bound is None else dt_bias


def decay(
    x: jax.Array, A_log: jax.Array, dt_bias: jax.Array, lower_bound: float | None, unit: float = 1.0, exact: bool = True
) -> jax.Array:
    """Return the decay of raw gates x; all float32 and of shapes that fit one another.

    Args:
      x, A_log, dt_bias, lower_bound: of the law, `in_range`.
      unit: the result is in nats times this.
      exact: decays are exact up to 3e-7 of themselves. Else up to 4e-6, which takes fewer operations and has no
        gradient of its own.
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
        g = decay(x, A_log, dt_bias, None)
        # A decay of 0 has no gradient, and the rounding of other terms is not to be multiplied by thousands of nats.
        dg = jnp.where(g > tiles.FORGET, dg, 0.0)
        return -a * jax.nn.sigmoid(y) * dg, jnp.maximum(g, tiles.FORGET) * dg
    # At its ends the law has no slope, and infinity times 0 is NaN.
    u = jnp.clip(a * y, -100.0, 100.0)
    open_ = jax.nn.sigmoid(u)
    du = float(lower_bound) * open_ * (1.0 - open_) * dg
    return a * du, u * du


def _softplus(x: jax.Array) -> jax.Array:
    """Return log(1 + e^x); neither does e^x overflow, nor is a small one lost beside 1."""
    return jnp.maximum(x, 0.0) + jnp.log1p(jnp.exp(-jnp.abs(x)))


def _softplus_of_few_operations(x: jax.Array) -> jax.Array:
    """Return log(1 + e^x); where it would overflow, x itself is the result."""
    y = jnp.exp(jnp.minimum(x, 80.0))
    series = y - (y * y) * (0.5 - y * jnp.float32(1 / 3))
    return jnp.maximum(x, jnp.where(y < _SMALL, series, jnp.log(1.0 + y)))


def decay_of_steps(dt: jax.Array, A_log: jax.Array) -> jax.Array:
    """Return -e^A_log dt, Mamba-2's decay of a time step in nats, for every A_log that is a number.

    In two factors neither overflows, and a step that is 0 forgets nothing.
    """
    root = jnp.exp(jnp.minimum(0.5 * A_log, 88.0))
    return -root * (root * dt)
