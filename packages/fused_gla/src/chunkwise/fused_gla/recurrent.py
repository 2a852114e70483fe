"""The token recurrences: the decode path, for one new token or a few per sequence."""

import jax

from chunkwise.fused_gla import api
from chunkwise.shared.operators import arguments, checks, decode


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
    sharding: arguments.Sharding | None = None,
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
      v: values [B, T, HV, V], likewise.
      g: log decay [B, T, HV] in nats, at most 0, -inf included, of any of these types; None for no decay.
      g_gamma: constant log decay per head [HV] in nats, likewise, added to g.
      scale: multiplies the output; defaults to K ** -0.5. A number, static, or a scalar array, which may be traced.
      initial_state: [N, HV, K, V], or a pool [slots, HV, K, V] with state_indices, of any of these types; None for
        zeros. A pool keeps its type.
      output_final_state: return the states after the tokens; static.
      cu_seqlens: boundaries of a packed batch, int32 [N + 1], traced; B must be 1. Tokens from cu_seqlens[N] on are
        padding, may hold anything and give zeros. The values are checked outside of jit only.
      state_indices: int32 [N], traced: the slot of every sequence. Slots must be distinct and exist; the values are
        not checked. A sequence with a negative slot starts from zeros and its state is dropped; negative slots are
        neither read nor written and may repeat.
      has_initial_state: bool [N], traced: False if a sequence starts from zeros whatever its slot holds, as in a slot
        that was freed; None for True.
      implementation: "fused" (one TPU kernel, interpreted elsewhere), "xla" (plain JAX, also the gradient of
        "fused"), None ("fused" on a TPU if the tokens and states fit into its fast memory, else "xla").
      sharding, context_axis: as in `fused_chunk_gla`. Devices that split the rows of a batch split
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
    if g is not None:
        checks.check_array("g", g, "B T HV")
    x = arguments.Arguments(q, k, v, g, None, g_gamma, scale, initial_state, cu_seqlens)
    api.check_arguments(x)
    options = arguments.Options(output_final_state, devices=arguments.Devices(sharding, context_axis))
    slots = arguments.Slots(state_indices, has_initial_state)
    return decode.run_recurrent(x, slots, options, implementation, "recurrent_simple_gla_fwd")


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
    sharding: arguments.Sharding | None = None,
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
    checks.check_array("g", g, "B T HV K")
    x = arguments.Arguments(q, k, v, g, None, None, scale, initial_state, cu_seqlens)
    api.check_arguments(x)
    options = arguments.Options(output_final_state, devices=arguments.Devices(sharding, context_axis))
    slots = arguments.Slots(state_indices, has_initial_state)
    return decode.run_recurrent(x, slots, options, implementation, "recurrent_gla_fwd")
