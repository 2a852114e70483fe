"""The operators as one serving step: whatever a scheduler packed, decodes first, over one pool of states."""

import jax

from chunkwise.fused_gdn import api as gdn
from chunkwise.fused_gla import api as gla
from chunkwise.kda import api as kda
from chunkwise.pipeline import docstrings, staged
from chunkwise.shared.operators import arguments, checks, gates, serving

_IMPLEMENTATION = """\
  implementation: "xla" (plain JAX, runs everywhere), "fused" (one Pallas TPU kernel for the decodes and one for the
    prefills, which read and write the pool themselves), "staged" (decodes as in "fused"; for the prefills a chain of
    kernels, which gets copies of their states). Off TPU the kernels are interpreted. None is the best for the backend:
    off TPU "xla"; on a TPU "fused" if its kernels take these sizes, else "staged"."""


def ragged_gated_delta_rule(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    g: jax.Array,
    beta: jax.Array,
    states: jax.Array,
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
    scale: float | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    A_log: jax.Array | None = None,
    dt_bias: jax.Array | None = None,
    lower_bound: float | None = None,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    chunk_size: int | None = None,
    implementation: str | None = None,
    sharding: arguments.Sharding | None = None,
) -> tuple[jax.Array, jax.Array]:
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
        rounded where they are stored.
      cu_seqlens: boundaries of the sequences, int32 [N + 1], rising from 0, the decodes first. Sequences may be empty:
        those read and write nothing. Tokens after the last sequence are padding: they may hold anything, NaN too, and
        their outputs are zeros.
      state_indices: int32 [N], the slot that a sequence reads and writes, after its last token; or [N, W]: after token
        t of a decode its state goes to slot state_indices[n, t], and after a prefill to state_indices[n, 0]. Where a
        sequence starts, num_accepted_tokens says. A negative slot is neither read, so that the sequence starts from
        zeros, nor written, and may repeat. No slot that is written may be named twice, nor be read by another sequence.
      has_initial_state: bool [N], False if a sequence starts from zeros whatever its slot holds, as in a slot that was
        freed; None for True.
      num_decodes: how many sequences, the first ones, go token by token. They have at most W tokens each, 1 where
        state_indices is [N]. A number or a traced int32 scalar; the number 0 compiles no decode.
      num_sequences: how many of the N sequences exist, likewise; None for all. The other entries may hold anything.
      read_indices: int32 [N], the slot that a sequence starts from instead, such as that of a cached prefix. It stays
        as it is, and several sequences may share it; negative for zeros.
      num_accepted_tokens: int32 [N], 1 to W: a sequence, decode or prefill, starts from slot
        state_indices[n, num_accepted_tokens[n] - 1], the state after as many tokens of the step before as were
        accepted. None for 1; not read with read_indices.
      block_state_indices: int32 [N, M], the slot of the state after every block of `block_size` tokens of a prefill,
        counted from its first token in this call; negative ones are not written. None for none.
      block_size: tokens of a block, a multiple of the chunk size; static.
      scale: multiplies q; defaults to K ** -0.5. A number, static, or a scalar array, which may be traced.
      use_qk_l2norm_in_kernel: replace q and k by x * rsqrt(sum x^2 + 1e-6), in float32; static.
      use_gate_in_kernel, A_log, dt_bias, lower_bound, use_beta_sigmoid_in_kernel, allow_neg_eigval: as in
        `chunk_gated_delta_rule`.
      chunk_size: tokens of a chunk of a prefill, one of 16, 32, 64, 128, or None for the best; static.
      implementation: how it is computed.
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
    laws = gates.Laws(use_gate_in_kernel, lower_bound, use_beta_sigmoid_in_kernel, allow_neg_eigval)
    x = arguments.Arguments(q, k, v, g, beta, None, scale, states, cu_seqlens, A_log, dt_bias)
    options = arguments.Options(
        True, use_qk_l2norm_in_kernel, chunk_size, None, laws, arguments.Devices(sharding), block_size
    )
    slots = arguments.Slots(
        state_indices, has_initial_state, read_indices, num_accepted_tokens, block_state_indices, num_decodes,
        num_sequences,
    )  # fmt: skip
    return gdn.ragged(x, slots, options, implementation, {"staged": staged.delta_rule}, staged.DELTA_RULE_STATES)


@docstrings.documented_by(ragged_gated_delta_rule, _IMPLEMENTATION)
def ragged_kda(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    g: jax.Array,
    beta: jax.Array,
    states: jax.Array,
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
    scale: float | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    gate_lower_bound: float | None = None,
    use_gate_in_kernel: bool = False,
    A_log: jax.Array | None = None,
    dt_bias: jax.Array | None = None,
    lower_bound: float | None = None,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    chunk_size: int | None = None,
    implementation: str | None = None,
    sharding: arguments.Sharding | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Kimi delta attention as one serving step: decodes, speculation and prefills over one pool of states.

    The equation of `chunk_kda`, for every sequence of a packed stream. All else is as in `ragged_gated_delta_rule`.

    Args:
      g: log decay per channel [1, T, HV, K] in nats, at most 0, of any strength.
      use_gate_in_kernel, A_log, dt_bias, lower_bound, use_beta_sigmoid_in_kernel, allow_neg_eigval: as in `chunk_kda`.

    Accuracy: that of `recurrent_kda` for decodes and of `chunk_kda` for prefills, plus the rounding of the states to
      the type of the pool.
    Cost: a decode reads the state of every sequence once and writes one for every token; prefills cost what `chunk_kda`
      costs with states, and nothing for decodes.
    """
    laws = gates.Laws(use_gate_in_kernel, lower_bound, use_beta_sigmoid_in_kernel, allow_neg_eigval)
    x = arguments.Arguments(q, k, v, g, beta, None, scale, states, cu_seqlens, A_log, dt_bias)
    devices = arguments.Devices(sharding)
    options = arguments.Options(True, use_qk_l2norm_in_kernel, chunk_size, gate_lower_bound, laws, devices, block_size)
    slots = arguments.Slots(
        state_indices, has_initial_state, read_indices, num_accepted_tokens, block_state_indices, num_decodes,
        num_sequences,
    )  # fmt: skip
    return kda.ragged(x, slots, options, implementation, {"staged": staged.delta_rule}, staged.DELTA_RULE_STATES)


@docstrings.documented_by(ragged_gated_delta_rule, _IMPLEMENTATION)
def ragged_simple_gla(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    g: jax.Array | None,
    states: jax.Array,
    cu_seqlens: jax.Array,
    state_indices: jax.Array,
    *,
    g_gamma: jax.Array | None = None,
    has_initial_state: jax.Array | None = None,
    num_decodes: int | jax.Array = 0,
    num_sequences: int | jax.Array | None = None,
    read_indices: jax.Array | None = None,
    num_accepted_tokens: jax.Array | None = None,
    block_state_indices: jax.Array | None = None,
    block_size: int | None = None,
    scale: float | None = None,
    chunk_size: int | None = None,
    implementation: str | None = None,
    sharding: arguments.Sharding | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Simple gated linear attention as one serving step: decodes, speculation and prefills over one pool of states.

    The equation of `chunk_simple_gla`, for every sequence of a packed stream: retention, lightning attention and
    Mamba-2 too. All else is as in `ragged_gated_delta_rule`.

    Args:
      g: log decay per head [1, T, HV] in nats, at most 0, of any strength; None for none.
      g_gamma: constant log decay per head [HV], added to g; None for none.

    Accuracy: that of `recurrent_simple_gla` for decodes and of `chunk_simple_gla` for prefills, plus the rounding of
      the states to the type of the pool.
    Cost: a decode reads the state of every sequence once and writes one for every token; prefills cost what
      `chunk_simple_gla` costs with states, and nothing for decodes.
    """
    x = arguments.Arguments(q, k, v, g, None, g_gamma, scale, states, cu_seqlens)
    options = arguments.Options(True, chunk_size=chunk_size, devices=arguments.Devices(sharding), block_size=block_size)
    slots = arguments.Slots(
        state_indices, has_initial_state, read_indices, num_accepted_tokens, block_state_indices, num_decodes,
        num_sequences,
    )  # fmt: skip
    return gla.ragged(x, slots, options, implementation, {"staged": staged.gla}, staged.GLA_STATES)


def check_step(
    cu_seqlens: jax.Array,
    state_indices: jax.Array,
    *,
    num_slots: int,
    num_tokens: int,
    has_initial_state: jax.Array | None = None,
    num_decodes: int | jax.Array = 0,
    num_sequences: int | jax.Array | None = None,
    read_indices: jax.Array | None = None,
    num_accepted_tokens: jax.Array | None = None,
    block_state_indices: jax.Array | None = None,
    block_size: int | None = None,
) -> None:
    """Check the values that a serving step is made of, which its shapes and types cannot tell.

    It finds boundaries that decrease or pass the end, counts that do not fit, decodes of too many tokens, slots out of
    range, slots that are written twice, and slots that one sequence writes and another starts from. Outside of jit the
    operators do so themselves. Under jit nothing can be raised, unless the program is made for it::

        checked = checkify.checkify(step)  # step calls check_step; checkify is of jax.experimental
        error, results = jax.jit(checked)(...)
        error.throw()

    Args:
      cu_seqlens, state_indices, has_initial_state, num_decodes, num_sequences: as in `ragged_gated_delta_rule`.
      read_indices, num_accepted_tokens, block_state_indices, block_size: likewise.
      num_slots: slots of the pool; static.
      num_tokens: T, tokens of the stream; static.

    Raises:
      ValueError: a shape or type is wrong, or outside of jit a value.
    """
    slots = arguments.Slots(
        state_indices, has_initial_state, read_indices, num_accepted_tokens, block_state_indices, num_decodes,
        num_sequences,
    )  # fmt: skip
    checks.check_packed(cu_seqlens, 1)
    checks.check_step_types(slots, cu_seqlens.shape[0] - 1, block_size)
    serving.check_step_values(cu_seqlens, slots, num_slots, num_tokens, block_size)
