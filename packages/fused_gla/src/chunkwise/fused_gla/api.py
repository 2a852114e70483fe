"""The contract: signatures and documentation; see `operator` for what stands behind them."""

import jax

from chunkwise.fused_gla.config import Config
from chunkwise.fused_gla.operator import GLA, SIMPLE_GLA
from chunkwise.shared.call import signature
from chunkwise.shared.call.arguments import Sharding
from chunkwise.shared.serving.state_pool import Pool


@signature.of(SIMPLE_GLA.chunk)
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
    segment_ids: jax.Array | None = None,
    chunk_size: int | None = None,
    implementation: str | None = None,
    sharding: Sharding | None = None,
    context_axis: str | tuple[str, ...] | None = None,
    config: Config | None = None,
) -> tuple[jax.Array, jax.Array | None]:
    """Gated linear attention with a gate per head, over whole sequences, chunk by chunk, differentiable.

    In value head n, with key head n // (HV // H), and the state read after the update::

        S_t = e^(g_t + g_gamma) S_{t-1} + k_t v_t^T
        o_t = scale S_t^T q_t

    Retention and lightning attention are this with constant gates g_gamma.

    Dims: B batch, T tokens, H query and key heads, HV value heads (a multiple of H), K and V key and value dimensions,
    C chunk size, N sequences (B, or those packed).

    Args:
      q, k: queries and keys [B, T, H, K], float32, bfloat16 or float16.
      v: values [B, T, HV, V], of the same types. If all three are bfloat16, the kernels' products take bfloat16
        operands, else float32 ones at full precision, as "xla" does; they accumulate in float32. States and gates are
        float32.
      g: log decay per head [B, T, HV] in nats, at most 0, of any strength: -inf forgets everything before. Of any of
        these types; None for none.
      g_gamma: constant log decay per head [HV] in nats, of a floating type, added to g. If its gradient is asked for,
        computed tiles enter bfloat16 products with 16 bits: it is one number for all tokens, and they cancel.
      scale: multiplies the output; defaults to K ** -0.5. A number, or a scalar array, traced or not.
      initial_state: [N, HV, K, V], of any of these types, or None for zeros.
      output_final_state: whether to return the final state; static.
      cu_seqlens: boundaries of a packed batch, int32 [N + 1], traced; B must be 1. Tokens from cu_seqlens[N] on are
        padding, may hold anything and give zeros. The values are checked outside of jit only.
      segment_ids: int32 [B, T], traced, instead of cu_seqlens and for any B: in every row the state starts anew where
        the id changes, and tokens of ids below 0 are padding, which may hold anything and give zeros. initial_state and
        final_state are then [B, HV, K, V]: before the first segment of a row and after its last. The cost is that of
        the same tokens without ids. NaN or infinity in one segment does not change a bit of the results of others under
        "fused"; elsewhere it may change their rounding.
      chunk_size: C, one of 16, 32, 64, 128, or None for the best; static.
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
      (o [B, T, HV, V] in the type of v, final_state [N, HV, K, V] float32 or None).

    Raises:
      ValueError: an argument has the wrong rank, shape or type.
      NotImplementedError: "fused", and a head is too large for fast memory.

    Differentiable once, in reverse, in every floating-point argument; "xla" by any transform of JAX.
    NaN or infinity in one sequence changes no bit of the others. It spoils the results of its own sequence from the
    chunk on in which it is, at boundaries of sequences those of other heads too.
    Accuracy: 3e-7 relative to the recurrence in float64 for float32 inputs, 3e-3 for bfloat16 inputs; any gate.
    Cost: 2 B T (H C K + HV C V + 2 HV K V) flops, and one read of q, k, v and write of o; the backward reads q, k, v,
      do and one state every `num_steps` chunks, and writes dq, dk, dv. A group of value heads larger than a grid step
      writes float32 sums of dq and dk for every step. With states in or out a packed batch also pays for the state of
      every sequence.
    Source: Dao and Gu, Transformers are SSMs (2024); Sun et al., Retentive Network (2023), for constant gates.
    """
    ...


@signature.of(GLA.chunk)
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
    segment_ids: jax.Array | None = None,
    chunk_size: int | None = None,
    implementation: str | None = None,
    sharding: Sharding | None = None,
    context_axis: str | tuple[str, ...] | None = None,
    config: Config | None = None,
) -> tuple[jax.Array, jax.Array | None]:
    """Gated linear attention with a gate per channel, over whole sequences, chunk by chunk, differentiable.

    In value head n, with key head n // (HV // H), and the state read after the update::

        S_t = Diag(e^g_t) S_{t-1} + k_t v_t^T
        o_t = scale S_t^T q_t

    Dims: B batch, T tokens, H query and key heads, HV value heads (a multiple of H), K and V key and value dimensions,
    C chunk size, N sequences (B, or those packed).

    Args:
      q, k: queries and keys [B, T, H, K], float32, bfloat16 or float16.
      v: values [B, T, HV, V], of the same types.
      g: log decay per channel of the key [B, T, HV, K] in nats, at most 0, of any strength: -inf forgets everything
        before. Of any of these types.
      scale, initial_state, output_final_state, cu_seqlens, segment_ids, chunk_size, sharding, context_axis, config: as
        in `chunk_simple_gla`.
      implementation: "xla" (plain JAX, runs everywhere), "staged" (a chain of Pallas TPU kernels, one for every stage;
        chunkwise.pipeline brings it), "fused" (one Pallas TPU kernel for each direction); off TPU the kernels are
        interpreted. None is the best for the backend: off TPU "xla"; on a TPU "fused" if its kernels take these sizes,
        else "staged" or "xla". The accuracy below is that of "xla" and "fused". "staged" hands one float32 sum of gates
        from stage to stage: if a chunk holds weak and strong gates at once, its error with float32 tensors can reach
        5e-5.

    Returns:
      (o [B, T, HV, V] in the type of v, final_state [N, HV, K, V] float32 or None).

    Raises:
      ValueError: an argument has the wrong rank, shape or type.
      NotImplementedError: "fused", and a head is too large for fast memory.

    Differentiable once, in reverse, in every floating-point argument; "xla" by any transform of JAX. What is not finite
    in one sequence stays in it, as in `chunk_simple_gla`.
    Accuracy: 3e-7 relative to the recurrence in float64 for float32 inputs, 3e-3 for bfloat16 inputs; any gate.
    Cost: 2 B T HV (C K + C V + 2 K V) flops, and one read of q, k, v and write of o; the backward reads q, k, v, do and
      one state every few chunks, and writes dq, dk, dv. With states in or out a packed batch also pays for the state
      of every sequence.
    Source: Yang et al., Gated Linear Attention Transformers (2023), sections 3 and 4.
    """
    ...


@signature.of(SIMPLE_GLA.recurrent)
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
    state_indices: jax.Array | None = None,
    has_initial_state: jax.Array | None = None,
    implementation: str | None = None,
    sharding: Sharding | None = None,
    context_axis: str | tuple[str, ...] | None = None,
) -> tuple[jax.Array, jax.Array | None]:
    """Return simple gated linear attention token by token, in one launch.

    In value head n, with key head n // (HV // H)::

        S_t = exp(g_t + g_gamma) S_{t-1} + k_t v_t^T        o_t = scale S_t^T q_t

    For serving, initial_state may be a pool of states::

        o, pool = recurrent_simple_gla(q, k, v, g, None, None, pool, True, state_indices=slots)

    If the pool is donated to the jitted program (donate_argnums), its states are updated in place and nothing else
    of it is touched.

    Dims: B batch, T tokens, H query and key heads, HV value heads (a multiple of H), K and V key and value dimensions,
    N sequences: B, or len(cu_seqlens) - 1.

    Args:
      q, k: queries and keys [B, T, H, K], float32, bfloat16 or float16; computed in float32, like all else.
      v: values [B, T, HV, V], of the same types.
      g: log decay [B, T, HV] in nats, at most 0, -inf included, of any of these types; None for no decay.
      g_gamma: constant log decay per head [HV] in nats, of a floating type, added to g.
      scale: multiplies the output; defaults to K ** -0.5. A number, static, or a scalar array, which may be traced.
      initial_state: [N, HV, K, V], or a pool [slots, HV, K, V] with state_indices, of any of these types; None for
        zeros. A pool keeps its type.
      output_final_state: return the states after the tokens; static.
      cu_seqlens: boundaries of a packed batch, int32 [N + 1], traced; B must be 1. Tokens from cu_seqlens[N] on are
        padding, may hold anything and give zeros. The values are checked outside of jit only.
      state_indices: int32 [N], traced: the slot of every sequence. A slot is named only once, which is checked outside
        of jit. A sequence with a negative slot starts from zeros and its state is dropped: negative slots are neither
        read nor written and may repeat. A slot past the end acts as a negative one.
      has_initial_state: bool [N], traced: False if a sequence starts from zeros whatever its slot holds, as in a slot
        that was freed; None for True.
      implementation: "fused" (one TPU kernel, interpreted elsewhere), "xla" (plain JAX, also the gradient of
        "fused"), None ("fused" on a TPU if the tokens and states fit into its fast memory, else "xla").
      sharding, context_axis: as in `chunk_simple_gla`. Devices that split the rows of a batch split
        the pool too. The slot of a sequence must lie in the part of its device: the output is NaN where it does not,
        and its state is dropped. A pool does not go with tokens that are split.

    Returns:
      o [B, T, HV, V] in the type of v, and the states, None unless asked for: float32 [N, HV, K, V], or the pool in
      its own type, in which the slots of no sequence keep every bit.

    Raises:
      ValueError: an argument has the wrong rank, shape or type.
      NotImplementedError: "fused" with more tokens or larger states than fit into VMEM.

    Differentiable in every floating-point argument; "xla" by any transform of JAX.
    Accuracy: 1e-6 relative to float64 for float32 inputs; the arithmetic is float32.
    Cost: 5 B T HV K V flops; every state is read and written once.
    Source: Dao and Gu, Transformers are SSMs (2024); Sun et al., Retentive Network (2023) for a constant gate.
    """
    ...


@signature.of(GLA.recurrent)
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
    state_indices: jax.Array | None = None,
    has_initial_state: jax.Array | None = None,
    implementation: str | None = None,
    sharding: Sharding | None = None,
    context_axis: str | tuple[str, ...] | None = None,
) -> tuple[jax.Array, jax.Array | None]:
    """Return gated linear attention, with a gate per channel, token by token, in one launch.

    In value head n, with key head n // (HV // H)::

        S_t = Diag(exp(g_t)) S_{t-1} + k_t v_t^T        o_t = scale S_t^T q_t

    For serving, initial_state may be a pool of states, as in `recurrent_simple_gla`.

    Dims: B batch, T tokens, H query and key heads, HV value heads (a multiple of H), K and V key and value dimensions,
    N sequences: B, or len(cu_seqlens) - 1.

    Args:
      q, k, v, scale, initial_state, output_final_state, cu_seqlens: as in `recurrent_simple_gla`.
      g: log decay per channel of the key [B, T, HV, K] in nats, at most 0, -inf included, of any of the types of q.
      state_indices, has_initial_state, implementation: as there.
      sharding, context_axis: as there.

    Returns:
      o and the states, as there.

    Raises:
      ValueError: an argument has the wrong rank, shape or type.
      NotImplementedError: "fused" with more tokens or larger states than fit into VMEM.

    Differentiable in every floating-point argument; "xla" by any transform of JAX.
    Accuracy: 1e-6 relative to float64 for float32 inputs; the arithmetic is float32.
    Cost: 5 B T HV K V flops; every state is read and written once.
    Source: Yang et al., Gated Linear Attention Transformers (2023).
    """
    ...


@signature.of(SIMPLE_GLA.ragged)
def ragged_simple_gla(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    g: jax.Array | None,
    states: Pool,
    cu_seqlens: jax.Array,
    state_indices: jax.Array,
    *,
    g_gamma: jax.Array | None = None,
    has_initial_state: jax.Array | None = None,
    num_decodes: int | jax.Array = 0,
    num_sequences: int | jax.Array | None = None,
    read_indices: jax.Array | None = None,
    num_accepted_tokens: jax.Array | None = None,
    decode_tokens: int | None = None,
    block_state_indices: jax.Array | None = None,
    block_size: int | None = None,
    scale: float | None = None,
    chunk_size: int | None = None,
    implementation: str | None = None,
    sharding: Sharding | None = None,
) -> tuple[jax.Array, Pool]:
    """Simple gated linear attention as one serving step: decodes, speculation and prefills over one pool of states.

    The equation of `chunk_simple_gla`, for every sequence of a packed stream: retention, lightning attention and
    Mamba-2 too. All else is as in `ragged_gated_delta_rule`.

    Args:
      q, k, v, states, cu_seqlens: as in `ragged_gated_delta_rule` of chunkwise.fused_gdn.
      state_indices, has_initial_state, num_decodes, num_sequences, read_indices, num_accepted_tokens: as there.
      decode_tokens: as there.
      block_state_indices, block_size, scale, chunk_size, implementation, sharding: as there.
      g: log decay per head [1, T, HV] in nats, at most 0, of any strength; None for none.
      g_gamma: constant log decay per head [HV], added to g; None for none.

    Returns:
      o [1, T, HV, V] in the type of v, and the pool.

    Raises:
      ValueError: an argument has the wrong rank, shape or type, or outside of jit a wrong value.
      NotImplementedError: "fused" with sizes that its kernels do not take.

    Accuracy: that of `recurrent_simple_gla` for decodes and of `chunk_simple_gla` for prefills, plus the rounding of
      the states to the type of the pool.
    Cost: a decode reads the state of every sequence once and writes one for every token; prefills cost what
      `chunk_simple_gla` costs with states, and nothing for decodes.
    """
    ...
