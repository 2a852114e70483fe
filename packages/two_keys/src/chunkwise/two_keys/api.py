"""The contract: signatures and documentation; see `operator` for what stands behind them."""

import jax

from chunkwise.kda.config import Config
from chunkwise.shared.call import signature
from chunkwise.shared.call.arguments import Sharding
from chunkwise.shared.serving.state_pool import Pool
from chunkwise.two_keys.operator import COMBA, GDN2


@signature.of(GDN2.chunk)
def chunk_gdn2(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    g: jax.Array,
    b: jax.Array,
    w: jax.Array,
    scale: float | None = None,
    initial_state: jax.Array | None = None,
    output_final_state: bool = False,
    *,
    use_qk_l2norm_in_kernel: bool = False,
    gate_lower_bound: float | None = None,
    use_gate_in_kernel: bool | str = False,
    A_log: jax.Array | None = None,
    dt_bias: jax.Array | None = None,
    lower_bound: float | None = None,
    use_erase_sigmoid_in_kernel: bool = False,
    use_write_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    cu_seqlens: jax.Array | None = None,
    segment_ids: jax.Array | None = None,
    chunk_size: int | None = None,
    implementation: str | None = None,
    sharding: Sharding | None = None,
    context_axis: str | tuple[str, ...] | None = None,
    config: Config | None = None,
) -> tuple[jax.Array, jax.Array | None]:
    """GDN-2, the gated delta rule that erases and writes apart, over whole sequences, chunk by chunk, differentiable.

    In value head n, with key head n // (HV // H), and the state read after the update::

        p_t, y_t = b_t * k_t, w_t * v_t
        S~  = Diag(e^g_t) S_{t-1}
        S_t = S~ + k_t (y_t - S~^T p_t)^T
        o_t = scale S_t^T q_t

    Dims: B batch, T tokens, H query and key heads, HV value heads (a multiple of H), K and V key and value dimensions.

    Args:
      q, k: queries and keys [B, T, H, K], float32, bfloat16 or float16.
      v: values [B, T, HV, V], of the same types.
      g: log decay per channel [B, T, HV, K] in nats, at most 0, of any strength.
      b: erase gates [B, T, HV, K], from 0 to 1, or to 2 where negative eigenvalues are allowed. |k . p| must be at most
        2, or states grow.
      w: write gates [B, T, HV, V].
      scale, initial_state, output_final_state, cu_seqlens, segment_ids, chunk_size, sharding: as in `chunk_kda`.
      context_axis, config: as there.
      use_qk_l2norm_in_kernel: scale q and k to unit length first; b multiplies the scaled key.
      use_gate_in_kernel, A_log, dt_bias, lower_bound, gate_lower_bound: as in `chunk_kda`.
      use_erase_sigmoid_in_kernel: b is raw, and the erase gate is sigmoid(b), in float32; static.
      use_write_sigmoid_in_kernel: w is raw, and the write gate is sigmoid(w), in float32; static.
      allow_neg_eigval: with use_erase_sigmoid_in_kernel, the erase gate is 2 sigmoid(b); static.
      implementation: "xla", "staged", "fused" or None, as in `chunk_kda`, whose kernels "fused" runs.

    Returns:
      o [B, T, HV, V] in the type of v, and final_state [N, HV, K, V] float32, None unless asked for. Gradients have the
      types of their inputs.

    Raises:
      ValueError: an argument has the wrong rank, shape or type, or blocks of `config` cut groups of value heads.
      NotImplementedError: "fused" with K or V above 256.

    Accuracy: that of `chunk_kda`, with erase gates up to 2 and repeated keys too.
    Cost: 2 B T HV (2 C K + 2 C V + 3 K V) flops, the backward twice as much; every tensor is read once and o is written
      once.
    Source: Gated DeltaNet 2; docs/two-keys.md has the chunk form and the special cases.
    """
    ...


@signature.of(GDN2.recurrent)
def recurrent_gdn2(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    g: jax.Array,
    b: jax.Array,
    w: jax.Array,
    scale: float | None = None,
    initial_state: jax.Array | None = None,
    output_final_state: bool = False,
    *,
    use_qk_l2norm_in_kernel: bool = False,
    gate_lower_bound: float | None = None,
    use_gate_in_kernel: bool | str = False,
    A_log: jax.Array | None = None,
    dt_bias: jax.Array | None = None,
    lower_bound: float | None = None,
    use_erase_sigmoid_in_kernel: bool = False,
    use_write_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    cu_seqlens: jax.Array | None = None,
    state_indices: jax.Array | None = None,
    has_initial_state: jax.Array | None = None,
    implementation: str | None = None,
    sharding: Sharding | None = None,
    context_axis: str | tuple[str, ...] | None = None,
) -> tuple[jax.Array, jax.Array | None]:
    """GDN-2, the gated delta rule that erases and writes apart, token by token, the decode path.

    The equation of `chunk_gdn2`, for one new token or a few of every sequence, in one launch.

    Args:
      q, k, v, g, b, w: as in `chunk_gdn2`; all is computed in float32.
      scale, output_final_state, cu_seqlens, use_qk_l2norm_in_kernel, use_gate_in_kernel, A_log, dt_bias: as there.
      lower_bound, use_erase_sigmoid_in_kernel, use_write_sigmoid_in_kernel, allow_neg_eigval: as there.
      initial_state, state_indices, has_initial_state, implementation, sharding, context_axis: as in `recurrent_kda`.
      gate_lower_bound: it changes nothing here.

    Returns:
      o [B, T, HV, V] in the type of v, and the states after the tokens [N, HV, K, V] float32, None unless asked for;
      with state_indices the pool in its own type.

    Raises:
      ValueError: an argument has the wrong rank, shape or type.
      NotImplementedError: "fused", and the tokens and states do not fit into VMEM.

    Accuracy: RMS error over RMS of the float64 recurrence below 1e-5 in float32.
    Cost: 7 B T HV K V flops; every state is read and written once.
    """
    ...


@signature.of(GDN2.ragged)
def ragged_gdn2(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    g: jax.Array,
    b: jax.Array,
    w: jax.Array,
    states: Pool,
    cu_seqlens: jax.Array,
    state_indices: jax.Array,
    *,
    has_initial_state: jax.Array | None = None,
    num_decodes: int | jax.Array = 0,
    num_sequences: int | jax.Array | None = None,
    read_indices: jax.Array | None = None,
    num_accepted_tokens: jax.Array | None = None,
    block_state_indices: jax.Array | None = None,
    block_size: int | None = None,
    decode_tokens: int | None = None,
    scale: float | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    gate_lower_bound: float | None = None,
    use_gate_in_kernel: bool | str = False,
    A_log: jax.Array | None = None,
    dt_bias: jax.Array | None = None,
    lower_bound: float | None = None,
    use_erase_sigmoid_in_kernel: bool = False,
    use_write_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    chunk_size: int | None = None,
    implementation: str | None = None,
    sharding: Sharding | None = None,
) -> tuple[jax.Array, Pool]:
    """GDN-2, the gated delta rule that erases and writes apart, as one serving step.

    The equation of `chunk_gdn2`, for every sequence of a packed stream: decodes, speculation and prefills over one
    pool of states.

    Args:
      q, k, v, g, b, w: as in `chunk_gdn2`, with B = 1, and so are the gates' arguments and scale.
      states, cu_seqlens, state_indices, has_initial_state, num_decodes, num_sequences: as in `ragged_kda`.
      read_indices, num_accepted_tokens, block_state_indices, block_size, decode_tokens: as there.
      chunk_size, implementation, sharding: as there.

    Returns:
      o [1, T, HV, V] in the type of v, and the pool.

    Raises:
      ValueError: an argument has the wrong rank, shape or type, or outside of jit a wrong value.
      NotImplementedError: "fused" with sizes that its kernels do not take.

    Accuracy: that of `recurrent_gdn2` for decodes and of `chunk_gdn2` for prefills, plus the rounding of the states
      to the type of the pool.
    Cost: a decode reads the state of every sequence once and writes one for every token.
    """
    ...


@signature.of(COMBA.chunk)
def chunk_comba(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    p: jax.Array,
    g: jax.Array,
    beta: jax.Array,
    scale: float | None = None,
    initial_state: jax.Array | None = None,
    output_final_state: bool = False,
    *,
    use_qk_l2norm_in_kernel: bool = False,
    gate_lower_bound: float | None = None,
    use_gate_in_kernel: bool | str = False,
    A_log: jax.Array | None = None,
    dt_bias: jax.Array | None = None,
    lower_bound: float | None = None,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    cu_seqlens: jax.Array | None = None,
    segment_ids: jax.Array | None = None,
    chunk_size: int | None = None,
    implementation: str | None = None,
    sharding: Sharding | None = None,
    context_axis: str | tuple[str, ...] | None = None,
    config: Config | None = None,
) -> tuple[jax.Array, jax.Array | None]:
    """Comba, the gated delta rule with erase keys of their own, over whole sequences, chunk by chunk, differentiable.

    In value head n, with key head n // (HV // H), and the state read after the update::

        S~  = e^g_t S_{t-1}
        S_t = S~ + beta_t k_t (v_t - S~^T p_t)^T
        o_t = scale S_t^T q_t

    Dims: B batch, T tokens, H query and key heads, HV value heads (a multiple of H), K and V key and value dimensions.

    Args:
      q, k, p: queries, keys and erase keys [B, T, H, K], float32, bfloat16 or float16. beta |k . p| must be at most 2,
        or states grow.
      v: values [B, T, HV, V], of the same types.
      g: log decay [B, T, HV] in nats, at most 0, of any strength.
      beta: step sizes [B, T, HV].
      scale, initial_state, output_final_state, cu_seqlens, segment_ids, chunk_size, sharding: as in `chunk_kda`.
      context_axis, config: as there.
      use_qk_l2norm_in_kernel: scale q, k and p to unit length first.
      use_gate_in_kernel, A_log, dt_bias, lower_bound, gate_lower_bound: as in `chunk_kda`; dt_bias is [HV].
      use_beta_sigmoid_in_kernel, allow_neg_eigval: as there.
      implementation: "xla", "staged", "fused" or None, as in `chunk_kda`, whose kernels "fused" runs.

    Returns:
      o [B, T, HV, V] in the type of v, and final_state [N, HV, K, V] float32, None unless asked for. Gradients have the
      types of their inputs.

    Raises:
      ValueError: an argument has the wrong rank, shape or type, or blocks of `config` cut groups of value heads.
      NotImplementedError: "fused" with K or V above 256.

    Accuracy: that of `chunk_kda`, with erase gates up to 2 and repeated keys too.
    Cost: 2 B T HV (2 C K + 2 C V + 3 K V) flops, the backward twice as much; every tensor is read once and o is written
      once.
    Source: Comba (2025); docs/two-keys.md has the chunk form and the special cases.
    """
    ...


@signature.of(COMBA.recurrent)
def recurrent_comba(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    p: jax.Array,
    g: jax.Array,
    beta: jax.Array,
    scale: float | None = None,
    initial_state: jax.Array | None = None,
    output_final_state: bool = False,
    *,
    use_qk_l2norm_in_kernel: bool = False,
    gate_lower_bound: float | None = None,
    use_gate_in_kernel: bool | str = False,
    A_log: jax.Array | None = None,
    dt_bias: jax.Array | None = None,
    lower_bound: float | None = None,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    cu_seqlens: jax.Array | None = None,
    state_indices: jax.Array | None = None,
    has_initial_state: jax.Array | None = None,
    implementation: str | None = None,
    sharding: Sharding | None = None,
    context_axis: str | tuple[str, ...] | None = None,
) -> tuple[jax.Array, jax.Array | None]:
    """Comba, the gated delta rule with erase keys of their own, token by token, the decode path.

    The equation of `chunk_comba`, for one new token or a few of every sequence, in one launch.

    Args:
      q, k, v, p, g, beta: as in `chunk_comba`; all is computed in float32.
      scale, output_final_state, cu_seqlens, use_qk_l2norm_in_kernel, use_gate_in_kernel, A_log, dt_bias: as there.
      lower_bound, use_beta_sigmoid_in_kernel, allow_neg_eigval: as there.
      initial_state, state_indices, has_initial_state, implementation, sharding, context_axis: as in `recurrent_kda`.
      gate_lower_bound: it changes nothing here.

    Returns:
      o [B, T, HV, V] in the type of v, and the states after the tokens [N, HV, K, V] float32, None unless asked for;
      with state_indices the pool in its own type.

    Raises:
      ValueError: an argument has the wrong rank, shape or type.
      NotImplementedError: "fused", and the tokens and states do not fit into VMEM.

    Accuracy: RMS error over RMS of the float64 recurrence below 1e-5 in float32.
    Cost: 7 B T HV K V flops; every state is read and written once.
    """
    ...


@signature.of(COMBA.ragged)
def ragged_comba(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    p: jax.Array,
    g: jax.Array,
    beta: jax.Array,
    states: Pool,
    cu_seqlens: jax.Array,
    state_indices: jax.Array,
    *,
    has_initial_state: jax.Array | None = None,
    num_decodes: int | jax.Array = 0,
    num_sequences: int | jax.Array | None = None,
    read_indices: jax.Array | None = None,
    num_accepted_tokens: jax.Array | None = None,
    block_state_indices: jax.Array | None = None,
    block_size: int | None = None,
    decode_tokens: int | None = None,
    scale: float | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    gate_lower_bound: float | None = None,
    use_gate_in_kernel: bool | str = False,
    A_log: jax.Array | None = None,
    dt_bias: jax.Array | None = None,
    lower_bound: float | None = None,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    chunk_size: int | None = None,
    implementation: str | None = None,
    sharding: Sharding | None = None,
) -> tuple[jax.Array, Pool]:
    """Comba, the gated delta rule with erase keys of their own, as one serving step.

    The equation of `chunk_comba`, for every sequence of a packed stream: decodes, speculation and prefills over one
    pool of states.

    Args:
      q, k, v, p, g, beta: as in `chunk_comba`, with B = 1, and so are the gates' arguments and scale.
      states, cu_seqlens, state_indices, has_initial_state, num_decodes, num_sequences: as in `ragged_kda`.
      read_indices, num_accepted_tokens, block_state_indices, block_size, decode_tokens: as there.
      chunk_size, implementation, sharding: as there.

    Returns:
      o [1, T, HV, V] in the type of v, and the pool.

    Raises:
      ValueError: an argument has the wrong rank, shape or type, or outside of jit a wrong value.
      NotImplementedError: "fused" with sizes that its kernels do not take.

    Accuracy: that of `recurrent_comba` for decodes and of `chunk_comba` for prefills, plus the rounding of the states
      to the type of the pool.
    Cost: a decode reads the state of every sequence once and writes one for every token.
    """
    ...
