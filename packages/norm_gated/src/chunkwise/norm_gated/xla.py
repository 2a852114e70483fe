"""The gated norm in plain JAX."""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from chunkwise.norm_gated import tile
from chunkwise.shared.kernels import activations

# Rows are divided by at least this, so that a row of zeros without an eps is not divided by zero.
_LEAST = 1e-37


def norm(x: jax.Array, z: jax.Array | None, weight: jax.Array, s: tile.NormStatic) -> jax.Array:
    """Return y [..., D] in the type of x."""
    y = x.astype(jnp.float32)
    gate: Any = 1.0 if z is None else activations.activate(z.astype(jnp.float32), s.activation)
    if not s.norm_before_gate:
        y = y * gate
    # Rows are divided by their largest entry, or by the root of eps if that is larger, so that no square overflows or
    # underflows. The result does not depend on this divisor, so it gets no gradient.
    root = math.sqrt(s.eps)
    largest = lax.stop_gradient(jnp.max(jnp.abs(y), axis=-1, keepdims=True))
    scale = 1.0 / jnp.maximum(largest, jnp.float32(max(root, _LEAST)))
    y, root = y * scale, jnp.float32(root) * scale
    y = y * lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + root * root)
    y = weight.astype(jnp.float32).reshape((1,) * (x.ndim - weight.ndim) + weight.shape) * y
    return (y * gate if s.norm_before_gate else y).astype(x.dtype)
