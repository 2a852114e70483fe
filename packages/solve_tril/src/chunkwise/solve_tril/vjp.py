"""The kernel with its gradient, on matrices."""

import functools

import jax

from chunkwise.solve_tril import kernel, kernel_bwd
from chunkwise.solve_tril.config import Config


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def solve(A: jax.Array, config: Config) -> jax.Array:
    """Run the forward kernel; see `kernel.launch`."""
    return kernel.launch(A, config)


def _forward(A, config):
    X = kernel.launch(A, config)
    return X, X


def _backward(config, X, dX):
    return (kernel_bwd.launch(X, dX, config),)


solve.defvjp(_forward, _backward)
