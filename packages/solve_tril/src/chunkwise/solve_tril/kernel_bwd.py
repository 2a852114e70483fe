"""The kernel of the gradient of the inverse: its body and its launcher."""

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from chunkwise.shared import compat
from chunkwise.shared.kernels import launcher
from chunkwise.solve_tril import config, cost, tile


def _solve_bwd_kernel(X_ref, dX_ref, dA_ref):
    dA_ref[...] = tile.solve_bwd_tile(X_ref[...], dX_ref[...])  # [matrices, C, C]


def launch(X: jax.Array, dX: jax.Array, config: config.Config) -> jax.Array:
    """Run the kernel on the inverse X and its cotangent dX [M, C, C] float32 -> dA [M, C, C] float32."""
    M, C, _ = X.shape
    block = pl.BlockSpec((config.matrices, C, C), lambda m: (m, 0, 0))
    return launcher.pallas_call(
        _solve_bwd_kernel,
        X,
        dX,
        name=f"solve_tril_bwd_c{C}",
        # Matrices are independent.
        grid=(M // config.matrices,),
        dimension_semantics=("parallel",),
        in_specs=[block, block],
        out_specs=block,
        out_shape=compat.out_struct(X.shape, jnp.float32, X, dX),
        cost_estimate=cost.cost(B=1, T=C, HV=M, C=C, backward=True),
    )
