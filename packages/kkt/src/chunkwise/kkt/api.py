"""The contract: documentation, argument checks and the choice of implementation."""

import functools

import jax

from chunkwise.kkt import config as tiles
from chunkwise.kkt import kernel
from chunkwise.shared.call import checks, configs, docstrings, unknown_arguments
from chunkwise.shared.kernels import chunking


@unknown_arguments.explained
@docstrings.completed(docstrings.STAGE)
def chunk_scaled_dot_kkt(
    k: jax.Array,
    beta: jax.Array,
    g_cum: jax.Array | None = None,
    cu_seqlens: jax.Array | None = None,
    chunk_size: int | None = None,
    *,
    p: jax.Array | None = None,
    implementation: str | None = None,
    config: tiles.Config | None = None,
) -> jax.Array:
    """Return the interaction matrix of the delta rule, chunk by chunk.

        A[i, j] = beta_i <k_i, exp(G_i - G_j) * k_j>

    This is A for tokens i > j of one chunk, in value head n with key head n // (HV // H). For i <= j it is zero, and
    p_i takes the place of k_i if there are erase keys. The chunk's triangular system is (I + A) x = b.

    Dims: B batch, T tokens, H key heads, HV value heads (a multiple of H), K key dimension, C chunk size,
    N packed sequences.

    Args:
      k: keys [B, T, H, K], float32, bfloat16 or float16. Products take bfloat16 operands if k is bfloat16, and else
        float32 operands at full precision; they accumulate in float32.
      beta: step sizes [B, T, HV], float32, bfloat16 or float16.
      p: erase keys [B, T, HV, K], in any type of k, of a delta rule that does not erase by k; None to erase by k.

    Returns:
      A [B, T, HV, C] float32. Row t belongs to token t, and column j to the j-th token of the same chunk. k, p, beta
      and g_cum have gradients under both implementations.

    Accuracy: 2e-7 relative to the definition in float64 for float32 inputs, 1e-7 for bfloat16 inputs, whose products
    are exact in float32.
    Cost: 2 B T C H K flops, with HV in the place of H for gates per channel, and 4 B T C HV bytes written.
    Source: Yang et al., Gated Delta Networks (2024), section 3.3; the WY form of Bischof and Van Loan (1985).
    """
    B, T, H, K = checks.check_array("k", k, "B T H K")
    HV = checks.check_array("beta", beta, "B T HV", (B, T, None))[2]
    checks.check_heads(H, HV, "beta")
    checks.check_gates("g_cum", g_cum, (B, T, HV), K)
    if p is not None:
        checks.check_array("p", p, "B T HV K", (B, T, HV, K))
    chunk_size = checks.choose_chunk_size(chunk_size)
    cu_seqlens = checks.check_cu_seqlens(cu_seqlens, B, T)
    implementation = configs.choose_stage(implementation, config, tiles)
    config = config or tiles.default_for(H, HV, chunk_size, K, k.dtype.itemsize, g_cum is not None and g_cum.ndim == 4)
    configs.check_blocks(config, H, HV)
    return _run(k, p, beta, g_cum, cu_seqlens, chunk_size, implementation, config)


@functools.partial(jax.jit, static_argnums=(5, 6, 7))
def _run(k, p, beta, g_cum, cu_seqlens, chunk_size, implementation, config):
    chunks = chunking.Chunking(*k.shape[:2], chunk_size, cu_seqlens)
    beta, p = chunks.split_rows(beta), None if p is None else chunks.split(p)
    g = chunks.split_gates(g_cum, beta.shape[1])
    (A,) = kernel.KKT.run(implementation, config.heads, k=chunks.split(k), beta=beta, g=g, p=p)
    return chunks.merge(A)
