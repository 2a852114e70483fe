"""The kernel with its gradient, on matrices: dA = -X^T dX X^T below the diagonal, X = (I + A)^-1."""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from chunkwise.shared.compat import out_struct
from chunkwise.shared.kernels import dot_nt, dot_tn, pallas_call, strictly_lower
from chunkwise.solve_tril import kernel
from chunkwise.solve_tril.config import Config


def solve_bwd_tile(X, dX):
    """Return dA [n, C, C] from the inverse X and its cotangent dX."""
    return jnp.where(strictly_lower(X.shape[1]), -dot_nt(dot_tn(X, dX), X), 0.0)


def _solve_bwd_kernel(X_ref, dX_ref, dA_ref):
    dA_ref[...] = solve_bwd_tile(X_ref[...], dX_ref[...])


def launch_bwd(X: jax.Array, dX: jax.Array, config: Config) -> jax.Array:
    """Run the backward kernel on matrices X, dX [M, C, C] float32 -> dA [M, C, C] float32."""
    M, C, _ = X.shape
    block = pl.BlockSpec((config.matrices, C, C), lambda m: (m, 0, 0))
    return pallas_call(
        _solve_bwd_kernel,
        X,
        dX,
        name=f"solve_tril_bwd_c{C}",
        # Matrices are independent.
        grid=(M // config.matrices,),
        dimension_semantics=("parallel",),
        in_specs=[block, block],
        out_specs=block,
        out_shape=out_struct(X.shape, jnp.float32, X, dX),
        cost_estimate=pl.CostEstimate(flops=4 * M * C**3, transcendentals=0, bytes_accessed=12 * M * C * C),
    )


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def solve(A: jax.Array, config: Config) -> jax.Array:
    """Run the forward kernel; see `kernel.launch`."""
    return kernel.launch(A, config)


def _forward(A, config):
    X = kernel.launch(A, config)
    return X, X


def _backward(config, X, dX):
    return (launch_bwd(X, dX, config),)


solve.defvjp(_forward, _backward)
