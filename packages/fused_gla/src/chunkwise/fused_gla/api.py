"""The contract: documentation, argument checks and the choice of implementation."""

import functools

import jax
import jax.numpy as jnp

from chunkwise.fused_gla import vjp, xla
from chunkwise.fused_gla.config import Config, default_for
from chunkwise.shared.compat import vary_alike
from chunkwise.shared.kernels import clip_gate, operand_dtype, scaled, split_scale
from chunkwise.shared.operators import (
    check,
    check_array,
    check_chunk_size,
    check_cu_seqlens,
    check_initial_state,
    check_scale,
    choose_implementation,
)


def fused_chunk_gla(
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
    chunk_size: int = 64,
    implementation: str | None = None,
    config: Config | None = None,
) -> tuple[jax.Array, jax.Array | None]:
    """Return gated linear attention, simple (a gate per head) or with a gate per channel, in one launch per direction.

    For every head::

        S_t = Diag(exp(g_t + g_gamma)) S_{t-1} + k_t v_t^T        o_t = scale S_t^T q_t

    Dims: B batch, T tokens, H heads, K and V key and value dimensions, C chunk size, N sequences (B, or those packed).

    Args:
      q, k: queries and keys [B, T, H, K], float32, bfloat16 or float16.
      v: values [B, T, H, V]. If all three are bfloat16, the kernels' products take bfloat16 operands, else float32 ones
        at full precision, as "xla" does; they accumulate in float32. States and gates are float32.
      g: log decay in nats, at most 0, -inf included: [B, T, H] per head or [B, T, H, K] per channel, of any of these
        types; None for no decay.
      g_gamma: constant log decay per head [H] in nats, likewise, added to g. Where its gradient is asked for, computed
        tiles enter bfloat16 products with 16 bits: it is one number for all tokens, and they cancel.
      scale: multiplies the output; defaults to K ** -0.5. A number, or a scalar array, traced or not.
      initial_state: [N, H, K, V], likewise, or None for zeros.
      output_final_state: whether to return the final state; static.
      cu_seqlens: boundaries of a packed batch, int32 [N + 1], traced; B must be 1. Tokens from cu_seqlens[N] on are
        padding and give zeros. The values are checked outside of jit only.
      chunk_size: C, one of 16, 32, 64, 128; static.
      implementation: "pallas" (TPU kernel, interpreted elsewhere), "xla" (plain JAX), None (the best for the backend).
      config: tile sizes of the kernels.

    Returns:
      (o [B, T, H, V] in the type of v, final_state [N, H, K, V] float32 or None).

    Raises:
      ValueError: an argument has the wrong rank, shape or type.
      NotImplementedError: "pallas", and a head is too large for fast memory; see `fits`.

    Differentiable once, in reverse, in every floating-point argument; "xla" by any transform of JAX.
    Accuracy: 3e-7 relative to the recurrence in float64 for float32 inputs, 3e-3 for bfloat16 inputs; any gate.
    Cost: 2 T H (C (K + V) + 2 K V) flops and one read of q, k, v and write of o; the backward reads q, k, v, do and
      one state every `num_steps` chunks, and writes dq, dk, dv. With states in or out a packed batch also pays for
      the state of every sequence.
    Source: Yang et al., Gated Linear Attention Transformers (2023), sections 3 and 4; Dao and Gu, Transformers are SSMs
      (2024), for a gate per head.
    """
    B, T, H, K = check_arguments(q, k, v, g, g_gamma, scale, initial_state, cu_seqlens, gate_ranks=(3, 4))
    check_chunk_size(chunk_size)
    config = config or _default_config(q, k, v, g, chunk_size)
    on_tpu = "xla" if config is None else "pallas"
    implementation = choose_implementation(implementation, ("pallas", "xla"), on_tpu)
    if config is not None:
        check(
            all(n >= 1 and H % n == 0 for n in (config.heads, config.heads_bwd)) and config.num_steps >= 1,
            f"`config` must have heads that divide H = {H} and at least one step; got {config}.",
        )
    elif implementation == "pallas":
        raise NotImplementedError(
            f'"pallas" keeps the states of a head in VMEM; K = {K} and V = {v.shape[3]} need more of it than there is: '
            f'use implementation="xla".'
        )
    scale = K**-0.5 if scale is None else scale
    inside, after = split_scale(scale) if implementation == "pallas" else (scale, None)
    o, state = _run(
        q, k, v, g, g_gamma, inside, initial_state, output_final_state, cu_seqlens, chunk_size, implementation, config
    )
    return scaled(o, after), state


def fits(q: jax.Array, k: jax.Array, v: jax.Array, g: jax.Array | None = None, chunk_size: int = 64) -> bool:
    """Return whether the kernels take these arguments of `fused_chunk_gla`, forward and backward; else "xla" must."""
    return _default_config(q, k, v, g, chunk_size) is not None


def _default_config(q, k, v, g, chunk_size) -> Config | None:
    (_, T, H, K), V = q.shape, v.shape[3]
    per_channel, size = g is not None and g.ndim == 4, operand_dtype(q.dtype, k.dtype, v.dtype).itemsize
    return default_for(H, K, V, chunk_size, -(-T // chunk_size), size, per_channel)


def check_arguments(q, k, v, g, g_gamma, scale, initial_state, cu_seqlens, gate_ranks) -> tuple[int, int, int, int]:
    """Check the arguments of an operator, with gates of one of `gate_ranks`, and return B, T, H, K."""
    B, T, H, K = check_array("k", k, "B T H K")
    check_array("q", q, "B T H K", (B, T, H, K))
    V = check_array("v", v, "B T H V", (B, T, H, None))[3]
    if g is not None:
        rank = getattr(g, "ndim", None)
        rank = rank if rank in gate_ranks else gate_ranks[0]
        check_array("g", g, "B T H K" if rank == 4 else "B T H", (B, T, H, K)[:rank])
    if g_gamma is not None:
        check_array("g_gamma", g_gamma, "H", (H,))
    check_scale(scale)
    check_cu_seqlens(cu_seqlens, B, T)
    N = B if cu_seqlens is None else cu_seqlens.shape[0] - 1
    check_initial_state(initial_state, (N, H, K, V))
    return B, T, H, K


def total_gate(q, g, g_gamma) -> jax.Array:
    """Return the gates with the constant ones added, [B, T, H] or [B, T, H, K] float32; zeros for None."""
    total = jnp.zeros(q.shape[:3], jnp.float32) if g is None else clip_gate(g)
    if g_gamma is None:
        return total
    constant = clip_gate(g_gamma)
    return total + (constant[:, None] if total.ndim == 4 else constant)


@functools.partial(jax.jit, static_argnums=(7, 9, 10, 11))
def _run(q, k, v, g, g_gamma, scale, initial_state, final, cu_seqlens, C, implementation, config):
    if implementation == "pallas":
        scale = jnp.full((1,), scale, jnp.float32)
        return vjp.fused(C, config, final, *vary_alike(q, k, v, g, g_gamma, scale, initial_state, cu_seqlens))
    if initial_state is not None:
        initial_state = jnp.swapaxes(initial_state.astype(jnp.float32), 2, 3)
    # JAX would round the gradient of a bfloat16 operand, which is that of the scores and of the states.
    exact = (x.astype(jnp.float32) for x in (q, k, v))
    o, state = xla.gla(*exact, total_gate(q, g, g_gamma), scale, initial_state, final, cu_seqlens, C)
    return o.astype(v.dtype), None if state is None else jnp.swapaxes(state, 2, 3)
