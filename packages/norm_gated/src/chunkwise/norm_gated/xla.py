"""The same in plain JAX."""

import jax
import jax.numpy as jnp
from jax import lax

from chunkwise.norm_gated import tile
from chunkwise.shared.kernels import activations


def norm(x: jax.Array, z: jax.Array, weight: jax.Array, s: tile.NormStatic) -> jax.Array:
    """Return y [..., D] in the type of x."""
    y, gate = x.astype(jnp.float32), activations.activate(z.astype(jnp.float32), s.activation)
    if not s.norm_before_gate:
        y = y * gate
    # A factor, so that it needs no gradient: the result does not depend on it.
    largest = lax.stop_gradient(jnp.max(jnp.abs(y), axis=-1, keepdims=True))
    y = y * tile.inverse_rms(y, largest, s.eps, lambda x: jnp.mean(x, axis=-1, keepdims=True))
    y = weight.astype(jnp.float32).reshape((1,) * (x.ndim - 1) + weight.shape) * y
    return (y * gate if s.norm_before_gate else y).astype(x.dtype)
