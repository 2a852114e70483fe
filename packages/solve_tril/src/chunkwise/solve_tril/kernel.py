"""The kernels of the inverse and of its gradient: bodies and launchers, and both as one differentiable function."""

import functools

import jax
import jax.numpy as jnp

from chunkwise.shared import compat
from chunkwise.shared.kernels import launcher, windows
from chunkwise.solve_tril import config, tile


def _solve_kernel(A_ref, A_inv_ref):
    A_inv_ref[...] = tile.solve_tile(A_ref[...])  # [matrices, C, C]


def launch(A: jax.Array, cut: config.Config) -> jax.Array:
    """Run the kernel on matrices A [M, C, C] float32 -> (I + A)^-1 [M, C, C] float32."""
    M, C, _ = A.shape
    block = windows.along((cut.matrices, C, C), 0)
    return launcher.pallas_call(
        _solve_kernel,
        A,
        name=f"solve_tril_fwd_c{C}",
        # Matrices are independent.
        grid=(M // cut.matrices,),
        dimension_semantics=("parallel",),
        in_specs=[block],
        out_specs=block,
        out_shape=compat.out_struct(A.shape, jnp.float32, A),
        cost_estimate=config.cost(B=1, T=C, HV=M, C=C),
    )


def _solve_bwd_kernel(X_ref, dX_ref, dA_ref):
    dA_ref[...] = tile.solve_bwd_tile(X_ref[...], dX_ref[...])  # [matrices, C, C]


def launch_bwd(X: jax.Array, dX: jax.Array, cut: config.Config) -> jax.Array:
    """Run the kernel on the inverse X and its cotangent dX [M, C, C] float32 -> dA [M, C, C] float32."""
    M, C, _ = X.shape
    block = windows.along((cut.matrices, C, C), 0)
    return launcher.pallas_call(
        _solve_bwd_kernel,
        X,
        dX,
        name=f"solve_tril_bwd_c{C}",
        # Matrices are independent.
        grid=(M // cut.matrices,),
        dimension_semantics=("parallel",),
        in_specs=[block, block],
        out_specs=block,
        out_shape=compat.out_struct(X.shape, jnp.float32, X, dX),
        cost_estimate=config.cost(B=1, T=C, HV=M, C=C, backward=True),
    )


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def solve(A: jax.Array, X: jax.Array | None, cut: config.Config) -> jax.Array:
    """Run the forward kernel, see `launch`; if its result X is known, return X."""
    return launch(A, cut) if X is None else X


def _forward(A, X, cut):
    X = solve(A, X, cut)
    return X, X


def _backward(cut, X, dX):
    # A known X gets no gradient, because all of the gradient goes to A.
    return launch_bwd(X, dX, cut), None


solve.defvjp(_forward, _backward)
