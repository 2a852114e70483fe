"""Activations by name, with their slopes: what a kernel applies where it has the numbers anyway."""

import jax
import jax.numpy as jnp

# None is the identity.
ACTIVATIONS = ("silu", "sigmoid", None)


def activate_with_slope(x: jax.Array, activation: str | None) -> tuple[jax.Array, jax.Array]:
    """Return the activation of x and its derivative there, of float32 x; the activation is one of `ACTIVATIONS`."""
    if activation is None:
        return x, jnp.ones_like(x)
    s = jax.nn.sigmoid(x)
    slope = s * (1.0 - s)
    return (s, slope) if activation == "sigmoid" else (x * s, s + x * slope)


def activate(x: jax.Array, activation: str | None) -> jax.Array:
    """Return the activation of float32 x, one of `ACTIVATIONS`."""
    return activate_with_slope(x, activation)[0]
