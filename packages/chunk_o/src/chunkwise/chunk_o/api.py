"""The contract: documentation, argument checks and the choice of implementation."""

import functools

import jax
import jax.numpy as jnp

from chunkwise.chunk_o import config as tiles
from chunkwise.chunk_o import kernel
from chunkwise.shared.call import checks, configs, docstrings, unknown_arguments
from chunkwise.shared.kernels import chunking, launcher


@unknown_arguments.explained
@docstrings.completed(docstrings.STAGE)
def chunk_fwd_o(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    h: jax.Array,
    g_cum: jax.Array | None = None,
    g_gamma: jax.Array | None = None,
    scale: float | None = None,
    cu_seqlens: jax.Array | None = None,
    chunk_size: int | None = None,
    *,
    implementation: str | None = None,
    config: tiles.Config | None = None,
) -> jax.Array:
    """Return the output of chunked linear attention from the states at chunk boundaries.

        o_i = scale (S^T (e^G_i * q_i) + sum over j <= i of <q_i, e^(G_i - G_j) * k_j> v_j)

    Token i belongs to a chunk, S is the state before the chunk, and value head n reads key head n // (HV // H). For the
    delta rule v is the v_new of `chunkwise.chunk_h.chunk_gated_delta_rule_fwd_h`.

    Dims: B batch, T tokens, H query and key heads, HV value heads (a multiple of H), K and V key and value dimensions,
    C chunk size, NT chunks a batch row, N packed sequences.

    Args:
      q, k: queries and keys [B, T, H, K], float32, bfloat16 or float16.
      v: values [B, T, HV, V], of the same types. Two bfloat16 tensors are multiplied as they are, everything else in
        float32 at full precision.
      h: states before each chunk [B, NT, HV, K, V], float32 from `chunkwise.chunk_h` (narrower types are widened); NT
        is ceil(T / C), or T // C + N for a packed batch.
      scale: multiplies the output; defaults to K ** -0.5. A number, or a scalar array, traced or not.

    Returns:
      o [B, T, HV, V] in the type of v. Every array, and a traced scale, has a gradient under both implementations.

    Accuracy: 3e-7 relative to the definition in float64 for float32 inputs, 2e-3 for bfloat16 inputs.
    Cost: 2 B T (H C K + HV (K V + C V)) flops, with HV in the place of H for gates per channel.
    Source: Yang et al., Gated Linear Attention Transformers (2023), section 3; Gated Delta Networks (2024).
    """
    B, T, H, K = checks.check_array("k", k, "B T H K")
    checks.check_array("q", q, "B T H K", (B, T, H, K))
    HV, V = checks.check_value_heads(v, (B, T, H, K))
    checks.check_gates("g_cum", g_cum, (B, T, HV), K)
    if g_gamma is not None:
        checks.check_array("g_gamma", g_gamma, "HV", (HV,))
    checks.check_scale(scale)
    C = checks.choose_chunk_size(chunk_size)
    cu_seqlens = checks.check_cu_seqlens(cu_seqlens, B, T)
    NT = chunking.num_chunks(T, C, None if cu_seqlens is None else cu_seqlens.shape[0] - 1)
    checks.check_array("h", h, "B NT HV K V", (B, NT, HV, K, V))
    implementation = configs.choose_stage(implementation, config, tiles)
    config = config or tiles.default_for(H, HV, C, K, V, g_cum is not None and g_cum.ndim == 4)
    configs.check_blocks(config, H, HV)
    scale = K**-0.5 if scale is None else scale
    inside, after = launcher.split_scale(scale) if implementation == "pallas" else (scale, None)
    o = _run(q, k, v, h, g_cum, g_gamma, inside, cu_seqlens, C, implementation, config)
    return launcher.scaled(o, after)


@functools.partial(jax.jit, static_argnames=("C", "implementation", "config"))
def _run(q, k, v, h, g_cum, g_gamma, scale, cu_seqlens, C: int, implementation: str, config: tiles.Config):
    chunks, dtype = chunking.Chunking(*k.shape[:2], C, cu_seqlens), v.dtype
    g = chunks.split_gates(g_cum, v.shape[2])  # rows [NC, HV, 1, C] or channels [NC, HV, C, K]
    if g_gamma is not None:
        gamma = chunks.gamma_rows(g_gamma)  # [NC, HV, 1, C]
        g = g + (gamma if g.shape[2] == 1 else jnp.swapaxes(gamma, -1, -2))
    q, k, v = chunks.split(q), chunks.split(k), chunks.split(v)  # [NC, H or HV, C, K or V]
    h = h.astype(jnp.float32).reshape(-1, *h.shape[2:])  # [NC, HV, K, V]
    scale = jnp.asarray(scale, jnp.float32)
    (o,) = kernel.OUTPUT.run(implementation, config.heads, q=q, k=k, v=v, h=h, g=g, scale=scale.reshape(1))
    return chunks.merge(o.astype(dtype))
