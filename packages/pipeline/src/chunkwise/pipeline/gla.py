"""Gated linear attention, with a gate per head or per channel: documentation and the choice of implementation."""

import jax

from chunkwise import fused_gla
from chunkwise.pipeline import staged
from chunkwise.pipeline.choice import choose, choose_recurrent
from chunkwise.shared.operators import check_array, check_chunk_size, check_cu_seqlens, check_initial_state, check_scale


def _run(q, k, v, g, g_gamma, scale, initial_state, output_final_state, cu_seqlens, chunk_size, implementation):
    """Run an operator on checked arguments."""
    implementation = choose(implementation, fused_gla.fits(q, k, v, g, chunk_size))
    scale = k.shape[-1] ** -0.5 if scale is None else scale
    if implementation == "staged":
        return staged.gla(q, k, v, g, g_gamma, scale, initial_state, cu_seqlens, output_final_state, chunk_size)
    return fused_gla.fused_chunk_gla(
        q, k, v, g, g_gamma, scale, initial_state, output_final_state, cu_seqlens=cu_seqlens, chunk_size=chunk_size,
        implementation="pallas" if implementation == "fused" else "xla",
    )  # fmt: skip


def _check(q, k, v, scale, initial_state, cu_seqlens, chunk_size):
    """Check what both operators share and return B, T, H, K."""
    B, T, H, K = check_array("q", q, "B T H K")
    check_array("k", k, "B T H K", (B, T, H, K))
    V = check_array("v", v, "B T H V", (B, T, H, None))[3]
    check_cu_seqlens(cu_seqlens, B, T)
    check_initial_state(initial_state, (B if cu_seqlens is None else cu_seqlens.shape[0] - 1, H, K, V))
    check_scale(scale)
    check_chunk_size(chunk_size)
    return B, T, H, K


def chunk_simple_gla(
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
) -> tuple[jax.Array, jax.Array | None]:
    """Gated linear attention with a gate per head, over whole sequences, chunk by chunk.

    In every head, the state read after the update::

        S_t = e^(g_t + g_gamma) S_{t-1} + k_t v_t^T
        o_t = scale S_t^T q_t

    Retention and lightning attention are this with constant gates g_gamma.

    Dims: B batch, T tokens, H heads, K and V key and value dimensions, N sequences: B, or len(cu_seqlens) - 1.

    Args:
      q, k: queries and keys [B, T, H, K], float32, bfloat16 or float16.
      v: values [B, T, H, V], likewise.
      g: log decay [B, T, H] in nats, <= 0, any strength: -inf forgets everything before; None for none.
      g_gamma: constant log decay per head [H] in nats, added to g; None for none.
      scale: multiplies q; defaults to K ** -0.5. A number or a traced scalar.
      initial_state: [N, H, K, V], any floating type; None for zeros.
      output_final_state: return the state after every sequence; static.
      cu_seqlens: boundaries of a packed batch, int32 [N + 1], traced: new values never recompile. B must be 1.
        Sequences may be empty; tokens from cu_seqlens[N] on are padding and give zeros. The values are checked outside
        of jit only.
      chunk_size: 16, 32, 64 or 128; static. All agree up to rounding.
      implementation: "xla" (plain JAX, runs everywhere), "staged" (a chain of Pallas TPU kernels), "fused" (one
        Pallas launch forward), both interpreted off TPU; None is the best for the backend.

    Returns:
      o [B, T, H, V] in the type of v, and final_state [N, H, K, V] float32, None unless asked for. Differentiable in
      every floating-point argument under every implementation.

    Raises:
      ValueError: an argument has the wrong rank, shape or type.
      NotImplementedError: "fused", and a head is too large for fast memory, from about 1,000 channels on.

    Accuracy: RMS error over RMS of the float64 recurrence below 1e-5 for float32 and .004 for bfloat16 inputs, for
    any gate.
    Cost: see `chunkwise.fused_gla.fused_chunk_gla`.
    Source: Dao and Gu, Transformers are SSMs (2024); Sun et al., Retentive Network (2023).
    """
    B, T, H, _ = _check(q, k, v, scale, initial_state, cu_seqlens, chunk_size)
    if g is not None:
        check_array("g", g, "B T H", (B, T, H))
    if g_gamma is not None:
        check_array("g_gamma", g_gamma, "H", (H,))
    return _run(q, k, v, g, g_gamma, scale, initial_state, output_final_state, cu_seqlens, chunk_size, implementation)


def chunk_gla(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    g: jax.Array,
    scale: float | None = None,
    initial_state: jax.Array | None = None,
    output_final_state: bool = False,
    *,
    cu_seqlens: jax.Array | None = None,
    chunk_size: int = 64,
    implementation: str | None = None,
) -> tuple[jax.Array, jax.Array | None]:
    """Gated linear attention with a gate per channel, over whole sequences, chunk by chunk.

    In every head, the state read after the update::

        S_t = Diag(e^g_t) S_{t-1} + k_t v_t^T
        o_t = scale S_t^T q_t

    The other arguments, the results and the errors are those of `chunk_simple_gla`.

    Args:
      q, k: queries and keys [B, T, H, K], float32, bfloat16 or float16.
      v: values [B, T, H, V], likewise.
      g: log decay per channel of the key [B, T, H, K] in nats, <= 0, any strength: -inf forgets everything before.
      scale, initial_state, output_final_state, cu_seqlens, chunk_size, implementation: as in `chunk_simple_gla`.

    Returns:
      o [B, T, H, V] in the type of v, and final_state [N, H, K, V] float32, None unless asked for.

    Raises:
      ValueError: an argument has the wrong rank, shape or type.

    Accuracy: as `chunk_simple_gla`.
    Cost: see `chunkwise.fused_gla.fused_chunk_gla`.
    Source: Yang et al., Gated Linear Attention Transformers (2023).
    """
    shape = _check(q, k, v, scale, initial_state, cu_seqlens, chunk_size)
    check_array("g", g, "B T H K", shape)
    return _run(q, k, v, g, None, scale, initial_state, output_final_state, cu_seqlens, chunk_size, implementation)


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
    """Gated linear attention with a gate per head, token by token: the decode path.

    In every head, the state read after the update::

        S_t = e^(g_t + g_gamma) S_{t-1} + k_t v_t^T
        o_t = scale S_t^T q_t

    Dims: as in `chunk_simple_gla`: q, k [B, T, H, K], v [B, T, H, V], g [B, T, H] and g_gamma [H] in nats.

    Args:
      q, k, v, g, g_gamma, scale, initial_state, output_final_state, cu_seqlens: of `chunk_simple_gla`.
      implementation: "xla" or None, which is the same.

    Returns:
      o [B, T, H, V] in the type of v, and final_state [N, H, K, V] float32, None unless asked for.

    Raises:
      ValueError: an argument has the wrong rank, shape or type.
      NotImplementedError: "staged" and "fused".

    Accuracy: 5e-7 relative to the recurrence in float64; everything is computed in float32, as sums.
    Cost: 5 B T H K V flops.
    Source: Dao and Gu, Transformers are SSMs (2024); Sun et al., Retentive Network (2023).
    """
    return fused_gla.recurrent_simple_gla(
        q, k, v, g, g_gamma, scale, initial_state, output_final_state, cu_seqlens=cu_seqlens,
        implementation=choose_recurrent("recurrent_simple_gla", implementation, ("xla",)),
    )  # fmt: skip


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
    """Gated linear attention with a gate per channel, token by token: the decode path.

    In every head, the state read after the update::

        S_t = Diag(e^g_t) S_{t-1} + k_t v_t^T
        o_t = scale S_t^T q_t

    Dims: as in `chunk_gla`: q, k [B, T, H, K], v [B, T, H, V], g [B, T, H, K] in nats.

    Args:
      q, k, v, g, scale, initial_state, output_final_state, cu_seqlens: of `chunk_gla`.
      implementation: "xla" or None, which is the same.

    Returns:
      o [B, T, H, V] in the type of v, and final_state [N, H, K, V] float32, None unless asked for.

    Raises:
      ValueError: an argument has the wrong rank, shape or type.
      NotImplementedError: "staged" and "fused".

    Accuracy: 5e-7 relative to the recurrence in float64; everything is computed in float32, as sums.
    Cost: 5 B T H K V flops.
    Source: Yang et al., Gated Linear Attention Transformers (2023).
    """
    return fused_gla.recurrent_gla(
        q, k, v, g, scale, initial_state, output_final_state, cu_seqlens=cu_seqlens,
        implementation=choose_recurrent("recurrent_gla", implementation, ("xla",)),
    )  # fmt: skip
