"""The contract: signatures and documentation; see `operator` for what stands behind them."""

import jax

from chunkwise.fused_gdn.config import Config
from chunkwise.fused_gdn.operator import OPERATOR
from chunkwise.shared.call import signature
from chunkwise.shared.call.arguments import Sharding
from chunkwise.shared.serving.state_pool import Pool


@signature.of(OPERATOR.chunk)
def chunk_gated_delta_rule(
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
    """Gated delta rule over whole sequences, chunk by chunk, differentiable.

    In value head n, with key head n // (HV // H), and the state read after the update::

        S~  = e^g_t S_{t-1}
        S_t = S~ + beta_t k_t (v_t - S~^T k_t)^T
        o_t = scale S_t^T q_t

    Dims: B batch, T tokens, H query and key heads, HV value heads (a multiple of H), K and V key and value dimensions,
    C chunk size, N sequences: B, or len(cu_seqlens) - 1.

    Args:
      q, k: queries and keys [B, T, H, K]. All tensors are float32, bfloat16 or float16, and may differ. Keys should
        have unit length (or pass use_qk_l2norm_in_kernel): the recurrence itself diverges if beta |k|^2 > 2.
      v: values [B, T, HV, V]. Only if q, k and v are all bfloat16 do products take bfloat16 operands, else float32.
      g: log decay [B, T, HV] in nats, at most 0, of any strength: -inf forgets everything before. Gates and step sizes
        are computed with in float32.
      beta: step sizes [B, T, HV], in (0, 1), or in (0, 2) if negative eigenvalues are allowed.
      scale: multiplies q; defaults to K ** -0.5. A number, static, or a scalar array, which may be traced and
        multiplies the output.
      initial_state: [N, HV, K, V] of any of these types, None for zeros. States are float32 inside.
      output_final_state: return the state after every sequence; static.
      use_qk_l2norm_in_kernel: replace q and k by x * rsqrt(sum x^2 + 1e-6), in float32; static.
      use_gate_in_kernel: g is the raw gate, and the decay is -exp(A_log) softplus(g + dt_bias), or with a lower_bound
        lower_bound * sigmoid(exp(A_log) (g + dt_bias)), in float32; static. Also the name of this law, "softplus" or
        "sigmoid".
      A_log: [HV] or [1, 1, HV, 1], any of these types; needed with use_gate_in_kernel and None without it, as the next
        two. With a lower_bound None stands for zeros.
      dt_bias: [HV]; None for zeros.
      lower_bound: of the decay, a negative number: it selects the second law; static.
      use_beta_sigmoid_in_kernel: beta is raw, and the step size is sigmoid(beta), in float32; static.
      allow_neg_eigval: with use_beta_sigmoid_in_kernel, the step size is 2 sigmoid(beta); static.
      cu_seqlens: boundaries of a packed batch, int32 [N + 1], traced: new values never recompile. B must be 1.
        Sequences may be empty. Tokens from cu_seqlens[N] on are padding: they may hold anything, NaN too, and their
        outputs and gradients are zeros. The values are checked outside of jit only. Without states in or out, chunks
        stay aligned to the stream and the cost follows the tokens; with states, a chunk takes as many steps as it
        holds sequences.
      segment_ids: int32 [B, T], traced, instead of cu_seqlens and for any B: in every row the state starts anew where
        the id changes, and tokens of ids below 0 are padding, which may hold anything and give zeros. initial_state and
        final_state are then [B, HV, K, V]: before the first segment of a row and after its last. The cost is that of
        the same tokens without ids. NaN or infinity in one segment does not change a bit of the results of others under
        "fused"; elsewhere it may change their rounding.
      chunk_size: C, one of 16, 32, 64, 128, or None for the best; static. All agree up to rounding.
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
      config: tile sizes of the kernels of "fused"; None for the best. A group of value heads too large for a step is
        cut, and q and k are repeated.

    Returns:
      o [B, T, HV, V] in the type of v, and final_state [N, HV, K, V] float32, None unless asked for. Gradients have the
      types of their inputs. NaN or infinity in one sequence does not change a bit of the results of others; in its own
      it may reach all heads.

    Raises:
      ValueError: an argument has the wrong rank, shape or type.
      NotImplementedError: "fused" with K or V above 256.

    Differentiable in every floating-point argument: once, in reverse; "xla" by any transform of JAX.

    Accuracy: RMS error over RMS of the float64 recurrence, for any gate. float32: o and states 3e-7, gradients 2e-6.
      bfloat16: o and states 3e-3, gradients of g and beta 6e-3, others 4e-3. Worst is one key for all tokens with
      beta 1.9 and no decay: float32 o 6e-6, gradients of g and beta 7e-5; bfloat16 o 3e-3, gradients of g and beta
      7e-2, others 9e-3. The cumulative gate, the inverse and the state are float32 in both.
    Cost: 2 B T HV (2 C K + 2 C V + 3 K V) flops, the backward twice as much; q, k, v are read and o is written once.
      Kept for the backward: the inputs and the float32 inverse, 4 B T HV C bytes. The backward of "fused" takes two
      launches: the states before every chunk, then one reverse pass.
    Source: Yang, Kautz and Hatamizadeh, Gated Delta Networks (2024), section 3.3.
    """
    ...


@signature.of(OPERATOR.recurrent)
def recurrent_gated_delta_rule(
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
    """Gated delta rule token by token, the decode path: one new token or a few for every sequence, in one launch.

    The equation, arguments and results of `chunk_gated_delta_rule`, less chunk_size. For serving, initial_state
    may be a pool of states::

        o, pool = recurrent_gated_delta_rule(q, k, v, g, beta, None, pool, True, state_indices=slots)

    If the pool is donated to the jitted program (donate_argnums), its states are updated in place and nothing else
    of it is touched.

    Dims: B batch, T tokens, H query and key heads, HV value heads (a multiple of H), K and V key and value dimensions,
    N sequences: B, or len(cu_seqlens) - 1.

    Args:
      q, k: [B, T, H, K]. All tensors are float32, bfloat16 or float16, and may differ; all is computed in float32.
      v: [B, T, HV, V].
      g: log decay [B, T, HV] in nats, at most 0, of any strength: -inf forgets everything before.
      beta: step sizes [B, T, HV].
      scale: multiplies q; defaults to K ** -0.5. A number, static, or a scalar array, which may be traced and
        multiplies the output.
      initial_state: [N, HV, K, V], or a pool [slots, HV, K, V] with state_indices, of any of these types; None for
        zeros. A pool keeps its type.
      output_final_state: return the states after the tokens; static.
      use_qk_l2norm_in_kernel: replace q and k by x * rsqrt(sum x^2 + 1e-6), in float32; static.
      use_gate_in_kernel, A_log, dt_bias, lower_bound, use_beta_sigmoid_in_kernel, allow_neg_eigval: as in
        `chunk_gated_delta_rule`.
      cu_seqlens: int32 [N + 1], traced: sequence n has the tokens cu_seqlens[n] to cu_seqlens[n + 1] - 1. B must be 1.
      state_indices: int32 [N], traced: the slot of every sequence. A slot is named only once, which is checked outside
        of jit. A sequence with a negative slot starts from zeros and its state is dropped: negative slots are neither
        read nor written and may repeat. A slot past the end acts as a negative one.
      has_initial_state: bool [N], traced: False if a sequence starts from zeros whatever its slot holds, as in a slot
        that was freed; None for True.
      implementation: "fused" (one Pallas TPU kernel, interpreted elsewhere), "xla" (plain JAX, also the gradient of
        "fused"), None ("fused" on a TPU if the tokens and states fit into its fast memory, else "xla").
      sharding, context_axis: as in `chunk_gated_delta_rule`. Devices that split the rows of a batch split
        the pool too. The slot of a sequence must lie in the part of its device: the output is NaN where it does not,
        and its state is dropped. A pool does not go with tokens that are split.

    Returns:
      o [B, T, HV, V] in the type of v, and the states after the tokens, None unless asked for: the pool, in its type,
      in which slots that no sequence names keep every bit; without state_indices [N, HV, K, V] float32.

    Raises:
      ValueError: an argument has the wrong rank, shape or type.
      NotImplementedError: "fused" with more tokens than fit into VMEM: about 1,000 of K = V = 128 in all.

    Accuracy: 3e-7 relative to the recurrence in float64, plus the rounding of o, and of a pool, to its type.
    Cost: 7 B T HV K V flops; the state of every sequence is read and written once.
    Source: Yang, Kautz and Hatamizadeh, Gated Delta Networks (2024).
    """
    ...


@signature.of(OPERATOR.ragged)
def ragged_gated_delta_rule(
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
    """Gated delta rule as one serving step: decodes, speculation and prefills over one pool of states.

    The equation of `chunk_gated_delta_rule`, for every sequence of a packed stream. A sequence starts from a slot of
    the pool and ends in one. If the pool is donated to the jitted program (donate_argnums), it is updated in place, and
    slots that no sequence names keep every bit. What changes from step to step is traced: one program serves all steps
    of the same T, N and W.

    Dims: T tokens of all sequences, H query and key heads, HV value heads (a multiple of H), K and V key and value
    dimensions, N the most sequences of a step, W the most tokens of a decode, M the most blocks of a prefill.

    Args:
      q, k: queries and keys [1, T, H, K]. All tensors are float32, bfloat16 or float16, and may differ.
      v: values [1, T, HV, V].
      g: log decay [1, T, HV] in nats, at most 0, of any strength: -inf forgets everything before.
      beta: step sizes [1, T, HV].
      states: the pool [slots, HV, K, V], of any of these types, which it keeps. States are float32 inside, and are
        rounded where they are stored. Or a `StatePool` of `make_pool`, whose states may be int8, and which may have a
        ring of tokens, so that a decode writes no state.
      cu_seqlens: boundaries of the sequences, int32 [N + 1], rising from 0, the decodes first. Sequences may be empty:
        those read and write nothing. Tokens after the last sequence are padding: they may hold anything, NaN too, and
        their outputs are zeros. A boundary that falls acts as the one before it, and one past the end as T.
      state_indices: int32 [N], the slot that a sequence reads and writes, after its last token; or [N, W]: after token
        t of a decode its state goes to slot state_indices[n, t], and after a prefill to state_indices[n, 0]. Where a
        sequence starts, num_accepted_tokens says. A negative slot is neither read, so that the sequence starts from
        zeros, nor written, and may repeat; a slot past the end acts as a negative one, here and in the arguments below.
        No slot that is written may be named twice, nor be read by another sequence.
      has_initial_state: bool [N], False if a sequence starts from zeros whatever its slot holds, as in a slot that was
        freed; None for True.
      num_decodes: how many sequences, the first ones, go token by token. They have at most W tokens each, 1 where
        state_indices is [N]. A number or a traced int32 scalar; the number 0 compiles no decode.
      num_sequences: how many of the N sequences exist, likewise; None for all. The other entries may hold anything. A
        count beyond N acts as N, and a negative one as 0; decodes beyond num_sequences do not exist.
      read_indices: int32 [N], the slot that a sequence starts from instead, such as that of a cached prefix. It stays
        as it is, and several sequences may share it; negative for zeros.
      num_accepted_tokens: int32 [N], 1 to W: a sequence, decode or prefill, starts from slot
        state_indices[n, num_accepted_tokens[n] - 1], the state after as many tokens of the step before as were
        accepted, and from zeros for any other number. None for 1; not read with read_indices. Over a pool with a ring:
        how many tokens of the decode before, in the slot that the sequence starts from, are kept; None for all. It is
        not read after a prefill, which is kept whole.
      decode_tokens: the most tokens of a decode over a pool with a ring, at most those of the ring; static, None for 1.
        state_indices are then [N]. None where there is no ring.
      block_state_indices: int32 [N, M], the slot of the state after every block of `block_size` tokens of a prefill,
        counted from its first token in this call; negative ones are not written. None for none.
      block_size: tokens of a block, a multiple of the chunk size; static.
      scale: multiplies q; defaults to K ** -0.5. A number, static, or a scalar array, which may be traced.
      use_qk_l2norm_in_kernel: replace q and k by x * rsqrt(sum x^2 + 1e-6), in float32; static.
      use_gate_in_kernel, A_log, dt_bias, lower_bound, use_beta_sigmoid_in_kernel, allow_neg_eigval: as in
        `chunk_gated_delta_rule`.
      chunk_size: tokens of a chunk of a prefill, one of 16, 32, 64, 128, or None for the best; static.
      implementation: "xla" (plain JAX, runs everywhere), "fused" (one Pallas TPU kernel for the decodes and one for
        the prefills, which read and write the pool themselves), "staged" (decodes as in "fused"; for the prefills a
        chain of kernels, which gets copies of their states; chunkwise.pipeline brings it). Off TPU the kernels are
        interpreted. None is the best for the backend: off TPU "xla"; on a TPU "fused" if its kernels take these sizes,
        else "staged" or "xla".
      sharding: how v is split over the devices of a mesh with automatic axes, a NamedSharding or a PartitionSpec;
        static. Over explicit axes the type of v says it. Value heads and value channels may be split, and the pool is
        split as they are.

    Returns:
      o [1, T, HV, V] in the type of v, and the pool. No gradient is defined: serving needs none.

    Raises:
      ValueError: an argument has the wrong rank, shape or type. Values are checked outside of jit only; for those
        under jit there is `check_step`.
      NotImplementedError: "fused" with sizes that its kernels do not take.

    Accuracy: that of `recurrent_gated_delta_rule` for decodes and of `chunk_gated_delta_rule` for prefills, plus the
      rounding of the states to the type of the pool.
    Cost: a decode reads the state of every sequence once and writes one for every token; prefills cost what
      `chunk_gated_delta_rule` costs with states, and nothing for decodes.
    Source: the scheduling of vLLM's gated delta net attention.
    """
    ...
