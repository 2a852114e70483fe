"""The kernel with its gradient, on chunks."""

import functools

import jax

from chunkwise.chunk_h import config, kernel, kernel_bwd


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def states(x: kernel.Operands, table: kernel.Table, end: jax.Array, N: int, config: config.Config):
    """Run the forward kernel; see `kernel.launch`, and `kernel_bwd.launch` for `end`."""
    return kernel.launch(x, table, N, config)


def _forward(x, table, end, N, config):
    h, v_new, final_state = kernel.launch(x, table, N, config)
    return (h, v_new, final_state), (x, table, end, h, v_new)


def _backward(N, config, residuals, cotangents):
    x, table, end, h, v_new = residuals
    dh, dv_new, dht = cotangents
    v_new = x.u if v_new is None else v_new
    return kernel_bwd.launch(x, h, v_new, table, end, dh, dv_new, dht, config), None, None


states.defvjp(_forward, _backward)
