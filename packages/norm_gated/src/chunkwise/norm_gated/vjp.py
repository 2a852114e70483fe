"""The kernels as one differentiable function of flat rows."""

import functools

import jax
import jax.numpy as jnp

from chunkwise.norm_gated import config, kernel, tile


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4, 5))
def norm(
    x: jax.Array, z: jax.Array | None, weight: jax.Array, s: tile.NormStatic, config: config.Config, in_place: bool
) -> jax.Array:
    """Return y for x, z [rows, groups * D] or no z, and the weight of every lane, float32 [1, groups * D].

    The backward reads x, so that only without a gradient y may take its memory.
    """
    return kernel.launch(x, z, weight, s, config, in_place=in_place)[0]


def _forward(x, z, weight, s, config, in_place):
    del in_place
    return kernel.launch(x, z, weight, s, config)[0], (x, z, weight)


def _backward(s, config, in_place, residuals, dy):
    del in_place
    dx, dz, dweight = kernel.launch(*residuals, s, config, dy)
    return dx, dz, jnp.sum(dweight, axis=0, keepdims=True)


norm.defvjp(_forward, _backward)
