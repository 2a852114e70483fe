"""The token recurrences in plain JAX: the decode path, for one new token or a few per sequence."""

import jax

from chunkwise.fused_gla.api import check_arguments, total_gate
from chunkwise.shared import token_by_token


def recurrent_simple_gla(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    g: jax.Array | None = None,
    g_gamma: jax.Array | None = None,
    scale: float | None = None,
    initial_state: jax.Array | None = None,
    output_final_state: bool = False,
    *,
    cu_seqlens: jax.Array | None = None,
    implementation: str | None = None,
) -> tuple[jax.Array, jax.Array | None]:
    """Return simple gated linear attention token by token.

    For every head::

        S_t = exp(g_t + g_gamma) S_{t-1} + k_t v_t^T        o_t = scale S_t^T q_t

    Dims, Args, Returns and Raises are those of `fused_chunk_gla` with g [B, T, H], without chunk_size and config.
    `implementation` is None or "xla". Differentiable by JAX.

    Accuracy: 1e-6 relative to float64 for float32 inputs; the arithmetic is float32.
    Cost: 6 T H K V flops and a state read and written a token: meant for few tokens.
    Source: Dao and Gu, Transformers are SSMs (2024); Sun et al., Retentive Network (2023) for a constant gate.
    """
    return _run(q, k, v, g, g_gamma, scale, initial_state, output_final_state, cu_seqlens, implementation, 3)


def recurrent_gla(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    g: jax.Array,
    scale: float | None = None,
    initial_state: jax.Array | None = None,
    output_final_state: bool = False,
    *,
    cu_seqlens: jax.Array | None = None,
    implementation: str | None = None,
) -> tuple[jax.Array, jax.Array | None]:
    """Return gated linear attention, with a gate per channel, token by token.

    For every head::

        S_t = Diag(exp(g_t)) S_{t-1} + k_t v_t^T        o_t = scale S_t^T q_t

    Dims, Args, Returns and Raises are those of `fused_chunk_gla` with g [B, T, H, K], without chunk_size and config.
    `implementation` is None or "xla". Differentiable by JAX.

    Accuracy: 1e-6 relative to float64 for float32 inputs; the arithmetic is float32.
    Cost: 6 T H K V flops and a state read and written a token: meant for few tokens.
    Source: Yang et al., Gated Linear Attention Transformers (2023).
    """
    return _run(q, k, v, g, None, scale, initial_state, output_final_state, cu_seqlens, implementation, 4)


def _run(q, k, v, g, g_gamma, scale, initial_state, output_final_state, cu_seqlens, implementation, gate_rank):
    check_arguments(q, k, v, g, g_gamma, initial_state, cu_seqlens, gate_ranks=(gate_rank,))
    if implementation not in (None, "xla"):
        raise ValueError(f"`implementation` must be None or one of ('xla',); got {implementation!r}.")
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    g = total_gate(q, g, g_gamma)
    o, state = token_by_token(q, k, v, g, None, scale, initial_state, cu_seqlens, normalise=False)
    return o, state if output_final_state else None
