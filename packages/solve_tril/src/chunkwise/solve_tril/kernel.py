"""The kernel of the inverse: its body and its launcher."""

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from chunkwise.shared.compat import out_struct
from chunkwise.shared.kernels import pallas_call
from chunkwise.solve_tril.config import Config
from chunkwise.solve_tril.cost import cost
from chunkwise.solve_tril.tile import solve_tile


def _solve_kernel(A_ref, A_inv_ref):
    A_inv_ref[...] = solve_tile(A_ref[...])  # [matrices, C, C]


def launch(A: jax.Array, config: Config) -> jax.Array:
    """Run the kernel on matrices A [M, C, C] float32 -> (I + A)^-1 [M, C, C] float32."""
    M, C, _ = A.shape
    block = pl.BlockSpec((config.matrices, C, C), lambda m: (m, 0, 0))
    return pallas_call(
        _solve_kernel,
        A,
        name=f"solve_tril_fwd_c{C}",
        # Matrices are independent.
        grid=(M // config.matrices,),
        dimension_semantics=("parallel",),
        in_specs=[block],
        out_specs=block,
        out_shape=out_struct(A.shape, jnp.float32, A),
        cost_estimate=cost(B=1, T=C, HV=M, C=C),
    )
