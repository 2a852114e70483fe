"""The laws that make decays of raw gates, in float32; arrays in, arrays out.

With x the raw gate, a = exp(A_log) and b = dt_bias, a decay in nats is

    softplus: g = -a softplus(x + b)        dx = -a sigmoid(x + b) dg      dA_log = sum g dg       db = sum dx
    sigmoid:  g = lower_bound sigmoid(u)    dx = a du                      dA_log = sum u du       db = sum dx
              u = a (x + b)                 du = g sigmoid(-u) dg

`LAWS` is the table of these laws. A new law is a class and a line of the table; the argument `use_gate_in_kernel` of
the operators then takes its name.
"""

import dataclasses
import math
from typing import ClassVar

import jax
import jax.numpy as jnp

from chunkwise.shared.kernels import tiles

# The largest A_log that the products of the laws take.
MOST_A_LOG = 40.0
# For y below this, log(1 + y) loses digits, and three terms of its series lose none.
_SMALL = 2.0**-6


@dataclasses.dataclass(frozen=True)
class Law:
    """A law of raw gates; it keeps decays above `lower_bound`, in nats.

    All arrays are float32 and of shapes that fit one another. After `in_range` both functions are exact for every A_log
    and x + dt_bias.
    """

    # Whether A_log must be an array, else None stands for zeros; and whether there must be a bound.
    needs_rate: ClassVar[bool] = False
    bounded: ClassVar[bool] = False
    lower_bound: float = -math.inf

    def in_range(self, A_log: jax.Array, dt_bias: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Return A_log and dt_bias that give the same decays, and of which exp(A_log) does not overflow.

        To cut A_log is enough for a law that has come to a limit there, whatever x is; a law that has not adds the rest
        to dt_bias.
        """
        return jnp.minimum(A_log, MOST_A_LOG), dt_bias

    def decay(
        self, x: jax.Array, A_log: jax.Array, dt_bias: jax.Array, unit: float = 1.0, exact: bool = True
    ) -> jax.Array:
        """Return the decay of raw gates x.

        Args:
          x, A_log, dt_bias: raw gates, and the arrays of the law after `in_range`.
          unit: multiplies the decay in nats, such as log2(e) for decays to base 2.
          exact: the relative error of decays is at most 3e-7. Otherwise it is at most 4e-6, which may take fewer
            operations, and there is no gradient.
        """
        raise NotImplementedError

    def gradient(
        self, x: jax.Array, A_log: jax.Array, dt_bias: jax.Array, dg: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """Return the gradients of x, and of A_log before its sum over tokens, for the gradient dg of `decay`."""
        raise NotImplementedError


class Softplus(Law):
    """The law without a bound."""

    needs_rate: ClassVar[bool] = True

    def in_range(self, A_log, dt_bias):
        """Move the part of A_log above 40 into the bias.

        This is exact: with so large an A_log, softplus(x + b) is e^(x + b), unless the decay exceeds 110 nats and
        counts as 0.
        """
        rest = jnp.maximum(A_log - MOST_A_LOG, 0.0)
        return jnp.minimum(A_log, MOST_A_LOG), dt_bias + rest

    def decay(self, x, A_log, dt_bias, unit=1.0, exact=True):
        """Return -a softplus(x + b)."""
        a, x = jnp.exp(A_log), x + dt_bias
        return (-unit * a) * (softplus(x) if exact else _softplus_of_few_operations(x))

    def gradient(self, x, A_log, dt_bias, dg):
        """Return the gradients of x and A_log."""
        a, y = jnp.exp(A_log), x + dt_bias
        g = self.decay(x, A_log, dt_bias)
        # A decay of 0 has no gradient. Without this, thousands of nats would multiply the rounding errors in dg.
        dg = jnp.where(g > tiles.FORGET, dg, 0.0)
        return -a * jax.nn.sigmoid(y) * dg, jnp.maximum(g, tiles.FORGET) * dg


class Sigmoid(Law):
    """The law with a bound. Where A_log exceeds 40, u is 0 or at a limit."""

    bounded: ClassVar[bool] = True

    def decay(self, x, A_log, dt_bias, unit=1.0, exact=True):
        """Return lower_bound sigmoid(a (x + b))."""
        a, x = jnp.exp(A_log), x + dt_bias
        return (unit * float(self.lower_bound)) * jax.nn.sigmoid(a * x)

    def gradient(self, x, A_log, dt_bias, dg):
        """Return the gradients of x and A_log."""
        a, y = jnp.exp(A_log), x + dt_bias
        # At its limits the law has no slope, and infinity times 0 is NaN.
        u = jnp.clip(a * y, -100.0, 100.0)
        # sigmoid(u) sigmoid(-u), where 1 - sigmoid(u) would lose all digits of a gate that is nearly saturated.
        e = jnp.exp(-jnp.abs(u))
        du = float(self.lower_bound) * (e / jnp.square(1.0 + e)) * dg
        return a * du, u * du


LAWS: dict[str, type[Law]] = {"softplus": Softplus, "sigmoid": Sigmoid}


def softplus(x: jax.Array) -> jax.Array:
    """Return log(1 + e^x), where e^x does not overflow, and a small e^x is not lost beside 1."""
    return jnp.maximum(x, 0.0) + jnp.log1p(jnp.exp(-jnp.abs(x)))


def _softplus_of_few_operations(x: jax.Array) -> jax.Array:
    """Return log(1 + e^x); the result is x itself where e^x would overflow."""
    y = jnp.exp(jnp.minimum(x, 80.0))
    series = y - (y * y) * (0.5 - y * jnp.float32(1 / 3))
    return jnp.maximum(x, jnp.where(y < _SMALL, series, jnp.log(1.0 + y)))


def decay_of_steps(dt: jax.Array, A_log: jax.Array) -> jax.Array:
    """Return -e^A_log dt, Mamba-2's decay of a time step in nats, for every finite A_log.

    e^A_log is two factors, of which neither overflows, so a step of 0 forgets nothing.
    """
    root = jnp.exp(jnp.minimum(0.5 * A_log, 88.0)).reshape((1,) * (dt.ndim - A_log.ndim) + A_log.shape)
    return -root * (root * dt)
