"""The kernel of the inverse: its body and its launcher."""

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from chunkwise.shared import compat
from chunkwise.shared.kernels import launcher
from chunkwise.solve_tril import config, cost, tile


def _solve_kernel(A_ref, A_inv_ref):
    A_inv_ref[...] = tile.solve_tile(A_ref[...])  # [matrices, C, C]


def launch(A: jax.Array, config: config.Config) -> jax.Array:
    """Run the kernel on matrices A [M, C, C] float32 -> (I + A)^-1 [M, C, C] float32."""
    M, C, _ = A.shape
    block = pl.BlockSpec((config.matrices, C, C), lambda m: (m, 0, 0))
    return launcher.pallas_call(
        _solve_kernel,
        A,
        name=f"solve_tril_fwd_c{C}",
        # Matrices are independent.
        grid=(M // config.matrices,),
        dimension_semantics=("parallel",),
        in_specs=[block],
        out_specs=block,
        out_shape=compat.out_struct(A.shape, jnp.float32, A),
        cost_estimate=cost.cost(B=1, T=C, HV=M, C=C),
    )
