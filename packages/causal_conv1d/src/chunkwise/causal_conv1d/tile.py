"""The mathematics of a strip of tokens; tap j is the strip j tokens earlier, [rows, 128] float32.

weight is a list of W rows [1, 128], the oldest token first: tap j is multiplied by row W - 1 - j.
"""

import jax
import jax.numpy as jnp

from chunkwise.shared.kernels import activations


def masked(taps: list[jax.Array], reach: jax.Array | None) -> list[jax.Array]:
    """Return taps, zero where they would cross the end of a sequence; `reach` [rows, 128] says how far they may go."""
    if reach is None:
        return taps
    return [jnp.where(reach >= jnp.float32(j), tap, 0.0) for j, tap in enumerate(taps)]


def convolve(taps: list[jax.Array], weight: list[jax.Array], bias: jax.Array | None = None) -> jax.Array:
    """Return the convolution, the sum of the taps times their weights."""
    total = taps[0] * weight[-1]
    for j in range(1, len(taps)):
        total = total + taps[j] * weight[-1 - j]
    return total if bias is None else total + bias


def gradient(pre: jax.Array, dy: jax.Array, activation: str | None, age: jax.Array | None) -> jax.Array:
    """Return the gradient of `pre`, the input of the activation; zero for padding, whose dy may hold anything."""
    d = dy * activations.activate_with_slope(pre, activation)[1]
    return d if age is None else jnp.where(age >= 0.0, d, 0.0)


def fold(x: jax.Array) -> jax.Array:
    """Return the sum [8, 128] of the registers of x [rows, 128]."""
    return jnp.sum(x.reshape(-1, 8, x.shape[1]), axis=0)
