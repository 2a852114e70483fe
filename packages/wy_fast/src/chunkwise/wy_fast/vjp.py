"""The kernel with its gradient, on chunks."""

import functools

import jax

from chunkwise.wy_fast import config, kernel, kernel_bwd


@functools.partial(jax.custom_vjp, nondiff_argnums=(5,))
def w_u(
    k: jax.Array, v: jax.Array, A_inv: jax.Array, beta: jax.Array, g: jax.Array, config: config.Config
) -> tuple[jax.Array, jax.Array]:
    """Run the forward kernel; see `kernel.launch`."""
    return kernel.launch(k, v, A_inv, beta, g, config)


def _forward(k, v, A_inv, beta, g, config):
    return kernel.launch(k, v, A_inv, beta, g, config), (k, v, A_inv, beta, g)


def _backward(config, operands, cotangents):
    return kernel_bwd.launch(*operands, *cotangents, config)


w_u.defvjp(_forward, _backward)
