"""The kernel with its gradient, on chunks."""

import functools

import jax

from chunkwise.chunk_o import config, kernel, kernel_bwd


@functools.partial(jax.custom_vjp, nondiff_argnums=(6,))
def output(q, k, v, h, g, scale: jax.Array, config: config.Config) -> jax.Array:
    """Run the forward kernel; see `kernel.launch`."""
    return kernel.launch(q, k, v, h, g, scale, config)


def _forward(q, k, v, h, g, scale, config):
    return kernel.launch(q, k, v, h, g, scale, config), (q, k, v, h, g, scale)


def _backward(config, operands, do):
    # The scale is a number: see `api`.
    return *kernel_bwd.launch(*operands, do, config), None


output.defvjp(_forward, _backward)
