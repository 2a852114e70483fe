"""The kernel with its gradient, on chunks."""

import functools

import jax

from chunkwise.kkt import config, kernel, kernel_bwd


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def kkt(k: jax.Array, beta: jax.Array, g: jax.Array, config: config.Config) -> jax.Array:
    """Run the forward kernel; see `kernel.launch`."""
    return kernel.launch(k, beta, g, config)


def _forward(k, beta, g, config):
    return kernel.launch(k, beta, g, config), (k, beta, g)


def _backward(config, operands, dA):
    return kernel_bwd.launch(*operands, dA, config)


kkt.defvjp(_forward, _backward)
