"""The contract: documentation, argument checks and the choice of implementation."""

import functools

import jax
import jax.numpy as jnp

from chunkwise.shared import tuning
from chunkwise.shared.call import checks, configs, docstrings, unknown_arguments
from chunkwise.shared.kernels import chunking, derivatives
from chunkwise.solve_tril import config as tiles
from chunkwise.solve_tril import kernel, xla


@unknown_arguments.explained
@docstrings.completed(docstrings.STAGE)
def solve_tril(
    A: jax.Array,
    cu_seqlens: jax.Array | None = None,
    *,
    A_inv: jax.Array | None = None,
    implementation: str | None = None,
    config: tiles.Config | None = None,
) -> jax.Array:
    """Return the exact inverse of I + A for every chunk, A strictly lower triangular.

        A_inv = (I + A)^-1        unit lower triangular

    A is the C x C matrix of one chunk and head. It is inverted by block substitution, never by powers of A. So the
    inverse is accurate also where keys repeat, where sums of powers cancel.

    Dims: B batch, T tokens, HV heads, C chunk size, N packed sequences.

    Args:
      A: [B, T, HV, C] float32 (bfloat16 and float16 are widened), where row t belongs to token t, and column j to the
        j-th token of the same chunk; C is one of 16, 32, 64, 128. Entries on and above the diagonal are not read.
      A_inv: the result of an earlier call for the same A, which is returned as it is; None to compute it. Gradients go
        to A, as if the inverse were computed here.

    Returns:
      A_inv [B, T, HV, C] float32, in the layout of A. A has a gradient under both implementations.

    Accuracy: 3e-7 relative to the inverse in float64 for keys of unit length, 2e-7 if all keys are equal and beta = 1,
    4e-6 if beta = 1.9, where the matrix has condition 3,000.
    Cost: B T HV (2 C C - 256) / 3 flops and 8 B T HV C bytes read and written.
    Source: the block inverse of Higham, Accuracy and Stability of Numerical Algorithms (2002), section 14.2.
    """
    B, T, _, C = checks.check_array("A", A, "B T HV C")
    checks.check(C in tuning.CHUNK_SIZES, f"`A` must have a last dimension of one of {tuning.CHUNK_SIZES}; got {C}.")
    if A_inv is not None:
        checks.check_array("A_inv", A_inv, "B T HV C", A.shape)
    cu_seqlens = checks.check_cu_seqlens(cu_seqlens, B, T)
    implementation = configs.choose_stage(implementation, config, tiles)
    return _run(A, cu_seqlens, A_inv, implementation, config)


@functools.partial(jax.jit, static_argnums=(3, 4))
def _run(A, cu_seqlens, A_inv, implementation, config):
    B, T, HV, C = A.shape
    chunks = chunking.Chunking(B, T, C, cu_seqlens)

    def split(x):
        return chunks.split(x.astype(jnp.float32)).reshape(-1, C, C)

    matrices, known = split(A), None if A_inv is None else split(A_inv)
    if implementation == "pallas":
        matrices = derivatives.of_kernel("solve_tril", matrices)
        config = config or tiles.default_for(chunks.NC, HV, C)
        configs.check_divides("matrices", config.matrices, len(matrices), "matrices, one for a chunk and head")
        A_inv = kernel.solve(matrices, known, config)
    else:
        A_inv = xla.inverse(matrices) if known is None else xla.known_inverse(matrices, known)
    return chunks.merge(A_inv.reshape(chunks.NC, HV, C, C))
