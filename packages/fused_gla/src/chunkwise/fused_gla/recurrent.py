"""The token recurrences in plain JAX: the decode path, for one new token or a few per sequence."""

import jax
import jax.numpy as jnp

from chunkwise.fused_gla.api import check_arguments, total_gate
from chunkwise.shared.operators import (
    Arguments,
    check_array,
    check_flags,
    check_scale,
    choose_implementation,
    token_by_token,
)


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

    Dims: B batch, T tokens, H heads, K and V key and value dimensions, N sequences (B, or those packed).

    Args:
      q, k: queries and keys [B, T, H, K], float32, bfloat16 or float16.
      v: values [B, T, H, V], likewise.
      g: log decay [B, T, H] in nats, at most 0, -inf included, of any of these types; None for no decay.
      g_gamma: constant log decay per head [H] in nats, likewise, added to g.
      scale: multiplies the output; defaults to K ** -0.5. A number, or a scalar array, traced or not.
      initial_state: [N, H, K, V], likewise, or None for zeros.
      output_final_state: whether to return the final state; static.
      cu_seqlens: boundaries of a packed batch, int32 [N + 1], traced; B must be 1. Tokens from cu_seqlens[N] on are
        padding, may hold anything and give zeros. The values are checked outside of jit only.
      implementation: None or "xla": there is no kernel.

    Returns:
      (o [B, T, H, V] in the type of v, final_state [N, H, K, V] float32 or None).

    Raises:
      ValueError: an argument has the wrong rank, shape or type.
      NotImplementedError: another implementation is asked for.

    Differentiable by JAX. Compiled once for the shapes of its arguments.
    Accuracy: 1e-6 relative to float64 for float32 inputs; the arithmetic is float32.
    Cost: 5 B T H K V flops, and a state read and written a token: meant for few tokens.
    Source: Dao and Gu, Transformers are SSMs (2024); Sun et al., Retentive Network (2023) for a constant gate.
    """
    x = Arguments(q, k, v, g, None, g_gamma, scale, initial_state, cu_seqlens)
    return _run(x, output_final_state, implementation, 3)


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

    Dims: B batch, T tokens, H heads, K and V key and value dimensions, N sequences (B, or those packed).

    Args:
      q, k: queries and keys [B, T, H, K], float32, bfloat16 or float16.
      v: values [B, T, H, V], likewise.
      g: log decay per channel of the key [B, T, H, K] in nats, at most 0, -inf included, of any of these types.
      scale: multiplies the output; defaults to K ** -0.5. A number, or a scalar array, traced or not.
      initial_state: [N, H, K, V], likewise, or None for zeros.
      output_final_state: whether to return the final state; static.
      cu_seqlens: boundaries of a packed batch, int32 [N + 1], traced; B must be 1. Tokens from cu_seqlens[N] on are
        padding, may hold anything and give zeros. The values are checked outside of jit only.
      implementation: None or "xla": there is no kernel.

    Returns:
      (o [B, T, H, V] in the type of v, final_state [N, H, K, V] float32 or None).

    Raises:
      ValueError: an argument has the wrong rank, shape or type.
      NotImplementedError: another implementation is asked for.

    Differentiable by JAX. Compiled once for the shapes of its arguments.
    Accuracy: 1e-6 relative to float64 for float32 inputs; the arithmetic is float32.
    Cost: 5 B T H K V flops, and a state read and written a token: meant for few tokens.
    Source: Yang et al., Gated Linear Attention Transformers (2023).
    """
    check_array("g", g, "B T H K")
    x = Arguments(q, k, v, g, None, None, scale, initial_state, cu_seqlens)
    return _run(x, output_final_state, implementation, 4)


def _run(x: Arguments, output_final_state, implementation, gate_rank):
    check_arguments(x, gate_ranks=(gate_rank,))
    check_scale(x.scale)
    check_flags(output_final_state=output_final_state)
    choose_implementation(implementation, ("xla",), on_tpu="xla")
    o, state = _compiled(x._replace(scale=x.q.shape[-1] ** -0.5 if x.scale is None else x.scale))
    return o, state if output_final_state else None


@jax.jit
def _compiled(x: Arguments):
    scale = jnp.asarray(x.scale, jnp.float32)
    return token_by_token(x.q, x.k, x.v, total_gate(x), None, scale, x.initial_state, x.cu_seqlens, normalise=False)
