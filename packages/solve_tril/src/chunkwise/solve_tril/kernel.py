"""The kernels of the inverse and of its gradient: bodies and launchers, and both as one differentiable function."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

from chunkwise.shared import compat
from chunkwise.shared.kernels import launcher, windows
from chunkwise.solve_tril import config, tile


def launch(A: jax.Array, cut: config.Config) -> jax.Array:
    """Run the kernel on matrices A [M, C, C] float32 -> (I + A)^-1 [M, C, C] float32."""
    return _launch(tile.solve_tile, "fwd", cut, A)


def launch_bwd(X: jax.Array, dX: jax.Array, cut: config.Config) -> jax.Array:
    """Run the kernel on the inverse X and its cotangent dX [M, C, C] float32 -> dA [M, C, C] float32."""
    return _launch(tile.solve_bwd_tile, "bwd", cut, X, dX)


def _launch(run: Callable[..., jax.Array], direction: str, cut: config.Config, *x: jax.Array) -> jax.Array:
    """Run a function of tiles [matrices, C, C] on all matrices [M, C, C]."""
    M, C, _ = x[0].shape

    def kernel(*refs):
        refs[-1][...] = run(*(ref[...] for ref in refs[:-1]))

    block = windows.along((cut.matrices, C, C), 0)
    return launcher.pallas_call(
        kernel,
        *x,
        name=f"solve_tril_{direction}_c{C}",
        # Matrices are independent.
        grid=(M // cut.matrices,),
        dimension_semantics=("parallel",),
        in_specs=[block] * len(x),
        out_specs=block,
        out_shape=compat.out_struct(x[0].shape, jnp.float32, *x),
        cost_estimate=config.cost(B=1, T=C, HV=M, C=C, backward=direction == "bwd"),
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
