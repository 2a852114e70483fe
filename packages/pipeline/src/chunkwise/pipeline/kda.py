"""Kimi delta attention: documentation and the choice of implementation."""

import jax

from chunkwise import kda
from chunkwise.kda.api import MOST_CHANNELS, check_gate_lower_bound
from chunkwise.pipeline import staged
from chunkwise.pipeline.choice import choose, choose_recurrent
from chunkwise.shared.operators import check_chunk_size, check_delta_rule, check_initial_state, check_scale


def chunk_kda(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    g: jax.Array,
    beta: jax.Array,
    scale: float | None = None,
    initial_state: jax.Array | None = None,
    output_final_state: bool = False,
    *,
    use_qk_l2norm_in_kernel: bool = False,
    gate_lower_bound: float | None = None,
    cu_seqlens: jax.Array | None = None,
    chunk_size: int = 64,
    implementation: str | None = None,
) -> tuple[jax.Array, jax.Array | None]:
    """Kimi delta attention over whole sequences, chunk by chunk.

    In value head n, with key head n // (HV // H), and the state read after the update::

        S~  = Diag(e^g_t) S_{t-1}
        S_t = S~ + beta_t k_t (v_t - S~^T k_t)^T
        o_t = scale S_t^T q_t

    Dims: B batch, T tokens, H query and key heads, HV value heads (a multiple of H), K and V key and value dimensions,
    N sequences: B, or len(cu_seqlens) - 1.

    Args:
      q, k: queries and keys [B, T, H, K], float32, bfloat16 or float16. Keys should have unit length (or pass
        use_qk_l2norm_in_kernel): the recurrence itself diverges where beta |k|^2 > 2.
      v: values [B, T, HV, V], likewise.
      g: log decay per channel of the key [B, T, HV, K] in nats, <= 0, any strength: -inf forgets everything before.
      beta: step sizes [B, T, HV], in (0, 1), or (0, 2) where negative eigenvalues are allowed.
      scale: multiplies q; defaults to K ** -0.5. A number or a traced scalar.
      initial_state: [N, HV, K, V], any floating type; None for zeros.
      output_final_state: return the state after every sequence; static.
      use_qk_l2norm_in_kernel: replace q and k by x * rsqrt(sum x^2 + 1e-6), in float32; static.
      gate_lower_bound: a promise that every g >= it; it may select a faster scheme, never another result; static.
      cu_seqlens: boundaries of a packed batch, int32 [N + 1], traced: new values never recompile. B must be 1.
        Sequences may be empty; tokens from cu_seqlens[N] on are padding and give zeros. The values are checked outside
        of jit only.
      chunk_size: 16, 32, 64 or 128; static. All agree up to rounding.
      implementation: "xla" (plain JAX, runs everywhere), "staged" (a chain of Pallas TPU kernels), "fused" (one
        Pallas launch forward), both interpreted off TPU; None is the best for the backend.

    Returns:
      o [B, T, HV, V] in the type of v, and final_state [N, HV, K, V] float32, None unless asked for. Differentiable in
      every floating-point argument under every implementation.

    Raises:
      ValueError: an argument has the wrong rank, shape or type.
      NotImplementedError: "fused" with K or V above 256.

    Accuracy: RMS error over RMS of the float64 recurrence below 1e-5 for float32 and .005 for bfloat16 inputs, for
    any gate.
    Cost: see `chunkwise.kda.fused_chunk_kda`.
    Source: Kimi Linear (2025).
    """
    B, T, H, HV, K, V = check_delta_rule(q, k, v, g, beta, cu_seqlens, per_channel=True)
    check_initial_state(initial_state, (B if cu_seqlens is None else cu_seqlens.shape[0] - 1, HV, K, V))
    check_chunk_size(chunk_size)
    check_scale(scale)
    check_gate_lower_bound(gate_lower_bound)
    implementation = choose(implementation, max(K, V) <= MOST_CHANNELS)
    scale = K**-0.5 if scale is None else scale
    if implementation == "staged":
        return staged.delta_rule(
            q, k, v, g, beta, scale, initial_state, cu_seqlens, output_final_state, use_qk_l2norm_in_kernel, chunk_size
        )
    return kda.fused_chunk_kda(
        q, k, v, g, beta, scale, initial_state, output_final_state, use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        gate_lower_bound=gate_lower_bound, cu_seqlens=cu_seqlens, chunk_size=chunk_size,
        implementation="pallas" if implementation == "fused" else "xla",
    )  # fmt: skip


def recurrent_kda(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    g: jax.Array,
    beta: jax.Array,
    scale: float | None = None,
    initial_state: jax.Array | None = None,
    output_final_state: bool = False,
    *,
    use_qk_l2norm_in_kernel: bool = False,
    gate_lower_bound: float | None = None,
    cu_seqlens: jax.Array | None = None,
    state_indices: jax.Array | None = None,
    has_initial_state: jax.Array | None = None,
    implementation: str | None = None,
) -> tuple[jax.Array, jax.Array | None]:
    """Kimi delta attention token by token, the decode path: for one new token or a few per sequence.

    In value head n, with key head n // (HV // H), and the state read after the update::

        S~  = Diag(e^g_t) S_{t-1}
        S_t = S~ + beta_t k_t (v_t - S~^T k_t)^T
        o_t = scale S_t^T q_t

    Dims: as in `chunk_kda`: q, k [B, T, H, K], v [B, T, HV, V], g (nats) [B, T, HV, K], beta [B, T, HV].

    Args:
      q, k, v, g, beta, scale, output_final_state, use_qk_l2norm_in_kernel, gate_lower_bound,
        cu_seqlens: of `chunk_kda`.
      initial_state: [N, HV, K, V], or a pool of states [slots, HV, K, V] with state_indices; None for zeros.
      state_indices: int32 [N], traced: the slot of every sequence, all distinct.
      has_initial_state: bool [N], traced: False where a sequence starts from zero whatever its slot holds; None for
        True.
      implementation: "xla", "fused" (one Pallas launch for all sequences), None (the best for the backend; on a TPU
        "fused" as long as tokens and states fit into its fast memory).

    Returns:
      o [B, T, HV, V] in the type of v, and the states after the last tokens, float32 in the shape of initial_state,
      None unless asked for. With the pool donated under jit, its states are updated in place.

    Raises:
      ValueError: an argument has the wrong rank, shape or type.
      NotImplementedError: "staged", or "fused" with more tokens or larger states than fit.

    Accuracy: 5e-7 relative to the recurrence in float64; everything is computed in float32, as sums.
    Cost: 7 B T HV K V flops; the state is read and written once.
    Source: Kimi Linear (2025).
    """
    return kda.recurrent_kda(
        q, k, v, g, beta, scale, initial_state, output_final_state, use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        gate_lower_bound=gate_lower_bound, cu_seqlens=cu_seqlens, state_indices=state_indices,
        has_initial_state=has_initial_state, implementation=choose_recurrent("recurrent_kda", implementation),
    )  # fmt: skip
