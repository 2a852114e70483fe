"""(I + A)^-1 of strictly lower A: tile mathematics, kernel body, launcher."""

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from chunkwise.shared.compat import out_struct
from chunkwise.shared.kernels import packing, pallas_call, side_lanes, split_lanes, unit_lower_inverse
from chunkwise.solve_tril.config import Config


def solve_tile(A):
    """Return (I + A)^-1 for A [n, C, C]; entries of A on and above the diagonal are not read.

    Rows of 16 x 16 blocks are eliminated one by one, then neighbouring blocks are joined by products, which is exact
    substitution (see `chunkwise.shared.kernels.inverse`). Powers of A would be exact in algebra only: they cancel
    catastrophically when keys repeat.
    """
    p = packing(A.shape[1], A.shape[0])
    return split_lanes(unit_lower_inverse(side_lanes(A, p)), p)


def _solve_kernel(A_ref, A_inv_ref):
    A_inv_ref[...] = solve_tile(A_ref[...])


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
        cost_estimate=pl.CostEstimate(flops=2 * M * C**3, transcendentals=0, bytes_accessed=8 * M * C * C),
    )
