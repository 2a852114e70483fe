"""The contract: signatures and documentation; see `operator` for what stands behind them."""

import jax

from chunkwise.kda.config import Config
from chunkwise.kda.operator import OPERATOR
from chunkwise.shared.call import signature
from chunkwise.shared.call.arguments import Sharding
from chunkwise.shared.serving.state_pool import Pool


@signature.of(OPERATOR.chunk)
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
    """Kimi delta attention over whole sequences, chunk by chunk, differentiable.

    In value head n, with key head n // (HV // H), and the state read after the update::

        S~  = Diag(e^g_t) S_{t-1}
        S_t = S~ + beta_t k_t (v_t - S~^T k_t)^T
        o_t = scale S_t^T q_t

    Dims: B batch, T tokens, H query and key heads, HV value heads (a multiple of H), K and V key and value dimensions,
    N sequences: B, or len(cu_seqlens) - 1.

    Args:
      q, k: queries and keys [B, T, H, K], float32, bfloat16 or float16. The kernels' products take bfloat16 operands
        where q, k and v are bfloat16, else float32 ones at full precision; everything else is float32.
      v: values [B, T, HV, V], of the same types.
      g: log decay per channel [B, T, HV, K] in nats, <= 0, any strength, any of these types; computed in float32. With
        bfloat16 tensors the forward kernel takes a decay between neighbouring rows of 8 for at least 2^-24 = 6e-8, far
        below their rounding.
      beta: step sizes [B, T, HV], in (0, 1), or (0, 2) where negative eigenvalues are allowed; types as of g.
      scale: multiplies q; defaults to K ** -0.5. A number, or a scalar array, which may be traced.
      initial_state: [N, HV, K, V], any floating type; None for zeros.
      output_final_state: return the state after every sequence; static.
      use_qk_l2norm_in_kernel: replace q and k by x * rsqrt(sum x^2 + 1e-6), in float32; static.
      gate_lower_bound: a promise that every g >= it, in nats; None or a number. Not the lower_bound below,
        which names a law. From -16.6 on one product replaces
        three where not all tensors are bfloat16, and in the backward. The result is the same, while entries of q and
        k stay below 2^31: they meet factors of up to 2^96.
      use_gate_in_kernel: g is the raw gate, and the decay is -exp(A_log) softplus(g + dt_bias), or with a lower_bound
        lower_bound * sigmoid(exp(A_log) (g + dt_bias)), in float32; static. Also the name of this law, "softplus" or
        "sigmoid". The kernels do it themselves: raw gates are
        read in their type, and no decay is written. With bfloat16 tensors the forward kernel takes softplus up to 4e-6.
      A_log: [HV] or [1, 1, HV, 1], any of these types; needed with use_gate_in_kernel and None without it, as the next
        two. With a lower_bound None stands for zeros.
      dt_bias: [HV, K], or flat [HV * K]; None for zeros.
      lower_bound: of the decay, a negative number: it selects the second law, and promises what gate_lower_bound does;
        static.
      use_beta_sigmoid_in_kernel: beta is raw, and the step size is sigmoid(beta), in float32; static.
      allow_neg_eigval: with use_beta_sigmoid_in_kernel, the step size is 2 sigmoid(beta); static.
      cu_seqlens: boundaries of a packed batch, int32 [N + 1], traced: new values never recompile. B must be 1.
        Sequences may be empty; tokens from cu_seqlens[N] on are padding, which may hold anything, and give zeros. The
        values are checked outside of jit only. Without states cost follows tokens; with states a chunk costs as much
        again for every sequence that begins inside it. What is not finite in one sequence never reaches another, nor
        another row of a batch; other heads of the same sequence it may.
      segment_ids: int32 [B, T], traced, instead of cu_seqlens and for any B: in every row the state starts anew where
        the id changes, and tokens of ids below 0 are padding, which may hold anything and give zeros. initial_state and
        final_state are then [B, HV, K, V]: before the first segment of a row and after its last. The cost is that of
        the same tokens without ids. NaN or infinity in one segment does not change a bit of the results of others under
        "fused"; elsewhere it may change their rounding.
      chunk_size: 16, 32, 64, 128 or None for the best; static. All agree up to rounding.
      implementation: "xla" (plain JAX, runs everywhere), "staged" (a chain of Pallas TPU kernels, one for every stage;
        chunkwise.pipeline brings it), "fused" (one Pallas TPU kernel for each direction); off TPU the kernels are
        interpreted. None is the best for the backend: off TPU "xla"; on a TPU "fused" if its kernels take these sizes,
        else "staged" or "xla". The accuracy below is that of "xla" and "fused". "staged" hands one float32 sum of gates
        from stage to stage: if a chunk holds weak and strong gates at once, its error with float32 tensors can reach
        5e-5.
      sharding: how v is split over the devices of a mesh with automatic axes, a NamedSharding or a PartitionSpec;
        static. Over explicit axes the type of v says it. Rows, tokens, value heads and value channels may be split,
        also over several axes each; every device computes its part, and only gradients of arguments that devices
        share are sums over them.
      context_axis: the axis or axes of a mesh, inside a `shard_map`, over which T is split; static. Each device has
        consecutive tokens. cu_seqlens are those of all tokens, and states are those before the first and after the last
        token, the same on all devices. segment_ids are those of the device's tokens.
      config: tile sizes of the kernels of "fused"; None for the best.

    Returns:
      o [B, T, HV, V] in the type of v, and final_state [N, HV, K, V] float32, None unless asked for. Gradients have the
      types of their inputs.

    Raises:
      ValueError: an argument has the wrong rank, shape or type, or blocks of `config` cut groups of value heads.
      NotImplementedError: "fused" with K or V above 256.

    Accuracy: RMS error over RMS of the float64 recurrence below 1e-5 for float32 and .005 for bfloat16 inputs, for any
    gate, repeated keys and beta up to 2; gradients below 1e-4 and .008 (g and beta .02).
    Cost: 2 B T HV (2 C K + 2 C V + 3 K V) flops, the backward twice as much; q, k, v and g are read and o is written
      once.
    Source: Kimi Linear (2025), section 3; the anchored products and the joined inverse are described in `tile`.
    """
    ...


@signature.of(OPERATOR.recurrent)
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
    """Kimi delta attention token by token, the decode path: one new token or a few for every sequence, in one launch.

    In value head n, with key head n // (HV // H), and the state read after the update::

        S~  = Diag(e^g_t) S_{t-1}
        S_t = S~ + beta_t k_t (v_t - S~^T k_t)^T
        o_t = scale S_t^T q_t

    For serving, initial_state may be a pool of states::

        o, pool = recurrent_kda(q, k, v, g, beta, None, pool, True, state_indices=slots)

    Under jit with the pool donated (donate_argnums), its states are updated in place and nothing else of it is touched.
    Both implementations are differentiable.

    Dims: B batch, T tokens, H query and key heads, HV value heads (a multiple of H), K and V key and value dimensions,
    N sequences: B, or len(cu_seqlens) - 1.

    Args:
      q, k: queries and keys [B, T, H, K], float32, bfloat16 or float16; computed in float32, like all else.
      v: values [B, T, HV, V], of the same types.
      g: log decay per channel [B, T, HV, K] in nats, <= 0, any strength.
      beta: step sizes [B, T, HV].
      scale, output_final_state, use_qk_l2norm_in_kernel, cu_seqlens: as in `chunk_kda`.
      use_gate_in_kernel, A_log, dt_bias, lower_bound, use_beta_sigmoid_in_kernel, allow_neg_eigval: as there.
      gate_lower_bound: as there; it changes nothing here.
      initial_state: [N, HV, K, V], or a pool [slots, HV, K, V] with state_indices, of any floating type; None for
        zeros.
      state_indices: int32 [N], traced: the slot of every sequence. A slot is named only once, which is checked outside
        of jit. A sequence with a negative slot starts from zeros and its state is dropped: negative slots are neither
        read nor written and may repeat. A slot past the end acts as a negative one.
      has_initial_state: bool [N], traced: False if a sequence starts from zeros whatever its slot holds, as in a slot
        that was freed; None for True.
      implementation: "fused" (one TPU kernel, interpreted elsewhere), "xla" (plain JAX, also the gradient of
        "fused"), None (the best for the backend).
      sharding, context_axis: as in `chunk_kda`. Devices that split the rows of a batch split
        the pool too. The slot of a sequence must lie in the part of its device: the output is NaN where it does not,
        and its state is dropped. A pool does not go with tokens that are split.

    Returns:
      o [B, T, HV, V] in the type of v, and the states, None unless asked for: float32 [N, HV, K, V], or the pool in
      its own type, in which the slots of no sequence keep every bit.

    Raises:
      ValueError: an argument has the wrong rank, shape or type.
      NotImplementedError: "fused" with more tokens or larger states than fit into VMEM.

    Accuracy: 5e-7 relative to the recurrence in float64; everything is computed in float32, as sums.
    Cost: 7 B T HV K V flops; every state is read and written once.
    Source: Kimi Linear (2025).
    """
    ...


@signature.of(OPERATOR.ragged)
def ragged_kda(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
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
    decode_tokens: int | None = None,
    block_state_indices: jax.Array | None = None,
    block_size: int | None = None,
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
    """Kimi delta attention as one serving step: decodes, speculation and prefills over one pool of states.

    The equation of `chunk_kda`, for every sequence of a packed stream. All else is as in `ragged_gated_delta_rule`.

    Args:
      q, k, v, beta, states, cu_seqlens: as in `ragged_gated_delta_rule` of chunkwise.fused_gdn.
      state_indices, has_initial_state, num_decodes, num_sequences, read_indices, num_accepted_tokens: as there.
      decode_tokens: as there.
      block_state_indices, block_size, scale, use_qk_l2norm_in_kernel, chunk_size, implementation, sharding: as there.
      g: log decay per channel [1, T, HV, K] in nats, at most 0, of any strength.
      use_gate_in_kernel, A_log, dt_bias, lower_bound, use_beta_sigmoid_in_kernel, allow_neg_eigval: as in `chunk_kda`.
      gate_lower_bound: as in `chunk_kda`.

    Returns:
      o [1, T, HV, V] in the type of v, and the pool.

    Raises:
      ValueError: an argument has the wrong rank, shape or type, or outside of jit a wrong value.
      NotImplementedError: "fused" with sizes that its kernels do not take.

    Accuracy: that of `recurrent_kda` for decodes and of `chunk_kda` for prefills, plus the rounding of the states to
      the type of the pool.
    Cost: a decode reads the state of every sequence once and writes one for every token; prefills cost what `chunk_kda`
      costs with states, and nothing for decodes.
    """
    ...
