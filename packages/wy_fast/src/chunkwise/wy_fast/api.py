"""The contract: documentation, argument checks and the choice of implementation."""

import functools

import jax
import jax.numpy as jnp

from chunkwise.shared import tuning
from chunkwise.shared.call import checks, configs, docstrings, unknown_arguments
from chunkwise.shared.kernels import chunking
from chunkwise.wy_fast import config as tiles
from chunkwise.wy_fast import kernel


@unknown_arguments.explained
@docstrings.completed(docstrings.STAGE)
def recompute_w_u(
    k: jax.Array,
    v: jax.Array,
    beta: jax.Array,
    A_inv: jax.Array,
    g_cum: jax.Array | None = None,
    cu_seqlens: jax.Array | None = None,
    *,
    implementation: str | None = None,
    config: tiles.Config | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Return the effective keys w and values u of the delta rule, chunk by chunk.

        w = A_inv (beta e^G k)        u = A_inv (beta v)

    These are the C tokens of one chunk, in value head n with key head n // (HV // H). The values that the chunk adds to
    the state S before it are v_new = u - w S.

    Dims: B batch, T tokens, H key heads, HV value heads (a multiple of H), K and V key and value dimensions,
    C chunk size, N packed sequences.

    Args:
      k: keys [B, T, H, K], float32, bfloat16 or float16.
      v: values [B, T, HV, V], of the same types. Products are float32 at full precision.
      beta: step sizes [B, T, HV], float32, bfloat16 or float16.
      A_inv: [B, T, HV, C], float32 from `chunkwise.solve_tril.solve_tril` (narrower types are widened); its last
        dimension is the chunk size.

    Returns:
      w [B, T, HV, K] and u [B, T, HV, V], float32 whatever the inputs are: u and w S cancel where keys repeat, which
      would amplify an error of bfloat16 a hundredfold. Every array has a gradient under both implementations.

    Accuracy: 2e-7 relative to the definition in float64.
    Cost: 2 B T C HV (K + V) flops.
    Source: Yang et al., Parallelizing Linear Transformers with the Delta Rule (2024), section 3.2.
    """
    B, T, H, K = checks.check_array("k", k, "B T H K")
    HV, V = checks.check_value_heads(v, (B, T, H, K))
    checks.check_array("beta", beta, "B T HV", (B, T, HV))
    C = checks.check_array("A_inv", A_inv, "B T HV C", (B, T, HV, None))[3]
    checks.check(
        C in tuning.CHUNK_SIZES, f"`A_inv` must have a last dimension of one of {tuning.CHUNK_SIZES}; got {C}."
    )
    checks.check_gates("g_cum", g_cum, (B, T, HV), K)
    cu_seqlens = checks.check_cu_seqlens(cu_seqlens, B, T)
    implementation = configs.choose_stage(implementation, config, tiles)
    config = config or tiles.default_for(H, HV, C, K, V, g_cum is not None and g_cum.ndim == 4)
    configs.check_blocks(config, H, HV)
    return _run(k, v, beta, A_inv, g_cum, cu_seqlens, implementation, config)


@functools.partial(jax.jit, static_argnums=(6, 7))
def _run(k, v, beta, A_inv, g_cum, cu_seqlens, implementation, config):
    chunks = chunking.Chunking(*A_inv.shape[:2], A_inv.shape[3], cu_seqlens)
    g, A_inv = chunks.split_gates(g_cum, v.shape[2]), chunks.split(A_inv.astype(jnp.float32))
    arrays = dict(k=chunks.split(k), v=chunks.split(v), A_inv=A_inv, beta=chunks.split_rows(beta), g=g)
    w, u = kernel.W_U.run(implementation, config.heads, **arrays)
    return chunks.merge(w), chunks.merge(u)
