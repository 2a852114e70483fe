"""Activations by name, with their derivatives, which a kernel applies to numbers that it holds anyway."""

import jax
import jax.numpy as jnp

# None is the identity.
ACTIVATIONS = ("silu", "sigmoid", None)


def activate_with_slope(x: jax.Array, activation: str | None) -> tuple[jax.Array, jax.Array]:
    """Return an activation of `ACTIVATIONS` and its derivative, both at float32 x."""
    if activation is None:
        return x, jnp.ones_like(x)
    s = jax.nn.sigmoid(x)
    slope = s * (1.0 - s)
    return (s, slope) if activation == "sigmoid" else (x * s, s + x * slope)


def activate(x: jax.Array, activation: str | None) -> jax.Array:
    """Return the activation of float32 x, one of `ACTIVATIONS`."""
    return activate_with_slope(x, activation)[0]
