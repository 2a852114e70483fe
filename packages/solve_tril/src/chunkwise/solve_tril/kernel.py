"""(I + A)^-1 of strictly lower A by the doubling ladder: tile mathematics, kernel body, launcher."""

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from chunkwise.shared import column_index, dot, out_struct, pallas_call, row_index
from chunkwise.solve_tril.config import Config


def level_mask(size: int, level: int):
    """Return the mask [1, size, size] of the lower-left b x b block of every 2b x 2b diagonal block, b = 2^level."""
    i, j = row_index(size), column_index(size)
    same_pair = (i >> (level + 1)) == (j >> (level + 1))
    return same_pair & (((i >> level) & 1) == 1) & (((j >> level) & 1) == 0)


def solve_tile(A):
    """Return (I + A)^-1 for A [n, C, C]; entries of A on and above the diagonal are not read.

    X starts as the identity. Level b = 1, 2, 4, ..., C/2 joins neighbouring b x b inverses into 2b x 2b ones:
    X <- X - X S X, S being A restricted to the lower-left blocks of the level. Exact substitution, in products.
    Powers of A would be exact in algebra only: they cancel catastrophically when keys repeat.
    """
    C = A.shape[1]
    identity = jnp.where(row_index(C) == column_index(C), 1.0, 0.0)
    X = identity - jnp.where(level_mask(C, 0), A, 0.0)
    for level in range(1, C.bit_length() - 1):
        S = jnp.where(level_mask(C, level), A, 0.0)
        X = X - dot(X, dot(S, X))
    return X


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
        cost_estimate=pl.CostEstimate(
            flops=4 * M * C**3 * (C.bit_length() - 2), transcendentals=0, bytes_accessed=8 * M * C * C
        ),
    )
