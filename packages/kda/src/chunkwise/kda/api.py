"""The contract: documentation, argument checks and the choice of implementation."""

import functools
import numbers

import jax
import jax.numpy as jnp

from chunkwise.kda import config as tiles
from chunkwise.kda import kernel, tile, xla
from chunkwise.kda.vjp import fused
from chunkwise.shared.compat import vary_alike
from chunkwise.shared.kernels import (
    Chunking,
    l2norm,
    operand_dtype,
    pad_lanes,
    scaled,
    split_scale,
    stream_masks,
    zero_padding,
)
from chunkwise.shared.operators import (
    check,
    check_chunk_size,
    check_delta_rule,
    check_initial_state,
    check_scale,
    check_slots,
    choose_implementation,
    decode,
    decode_fits,
)

_IMPLEMENTATIONS = ("pallas", "xla")
# The kernels keep whole states of a head in fast memory.
MOST_CHANNELS = 256


def check_gate_lower_bound(gate_lower_bound) -> None:
    """Check the promise about the gates: None or a number, which cannot be traced."""
    number = isinstance(gate_lower_bound, numbers.Real) and not isinstance(gate_lower_bound, bool)
    check(
        gate_lower_bound is None or (number and gate_lower_bound <= 0),
        f"`gate_lower_bound` must be None or a number <= 0; got {gate_lower_bound!r}.",
    )


def _check(q, k, v, g, beta, scale, cu_seqlens, gate_lower_bound):
    """Check the arguments but for the states and return the sizes B, H, HV, K, V."""
    B, T, H, HV, K, V = check_delta_rule(q, k, v, g, beta, cu_seqlens, per_channel=True)
    check_scale(scale)
    check_gate_lower_bound(gate_lower_bound)
    return B, H, HV, K, V


def _check_config(config: tiles.Config, H: int, HV: int) -> None:
    """Check that blocks of value heads hold whole groups that share a key head, or lie inside one."""
    group = HV // H
    for name, heads in (("heads", config.heads), ("heads_bwd", config.heads_bwd)):
        check(
            heads >= 1 and HV % heads == 0 and (heads % group == 0 or group % heads == 0),
            f"`config.{name}` must divide {HV} value heads in whole groups of {group} or inside of one; got {heads}.",
        )


def fused_chunk_kda(
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
    config: tiles.Config | None = None,
) -> tuple[jax.Array, jax.Array | None]:
    """Kimi delta attention over whole sequences, one launch a direction.

    In value head n, with key head n // (HV // H), and the state read after the update::

        S~  = Diag(e^g_t) S_{t-1}
        S_t = S~ + beta_t k_t (v_t - S~^T k_t)^T
        o_t = scale S_t^T q_t

    Dims: B batch, T tokens, H query and key heads, HV value heads (a multiple of H), K and V key and value dimensions,
    N sequences: B, or len(cu_seqlens) - 1.

    Args:
      q, k: queries and keys [B, T, H, K], float32, bfloat16 or float16. The kernels' products take bfloat16 operands
        where q, k and v are bfloat16, else float32 ones at full precision; everything else is float32.
      v: values [B, T, HV, V], likewise.
      g: log decay per channel [B, T, HV, K] in nats, <= 0, any strength, any of these types; computed in float32. With
        bfloat16 tensors the forward kernel takes a decay between neighbouring rows of 8 for at least 2^-24 = 6e-8, far
        below their rounding.
      beta: step sizes [B, T, HV], in (0, 1), or (0, 2) where negative eigenvalues are allowed; types as of g.
      scale: multiplies q; defaults to K ** -0.5. A number, or a scalar array, which may be traced.
      initial_state: [N, HV, K, V], any floating type; None for zeros.
      output_final_state: return the state after every sequence; static.
      use_qk_l2norm_in_kernel: replace q and k by x * rsqrt(sum x^2 + 1e-6), in float32; static.
      gate_lower_bound: a promise that every g >= it, in nats; None or a number. From -16.6 on one product replaces
        three where not all tensors are bfloat16, and in the backward. The result is the same, while entries of q and
        k stay below 2^31: they meet factors of up to 2^96.
      cu_seqlens: boundaries of a packed batch, int32 [N + 1], traced: new values never recompile. B must be 1.
        Sequences may be empty; tokens from cu_seqlens[N] on are padding and give zeros. The values are checked outside
        of jit only. Without states the chunks stay aligned to the stream and cost follows tokens; with states they
        restart at every sequence.
      chunk_size: 16, 32, 64 or 128; static. All agree up to rounding.
      implementation: "pallas" (one TPU kernel a direction, interpreted elsewhere), "xla" (plain JAX), None (the best
        for the backend).
      config: tile sizes of the kernels.

    Returns:
      o [B, T, HV, V] in the type of v, and final_state [N, HV, K, V] float32, None unless asked for. Gradients have the
      types of their inputs.

    Raises:
      ValueError: an argument has the wrong rank, shape or type, or blocks of `config` cut groups of value heads.
      NotImplementedError: "pallas" with K or V above 256.

    Accuracy: RMS error over RMS of the float64 recurrence below 1e-5 for float32 and .005 for bfloat16 inputs, for any
    gate, repeated keys and beta up to 2; gradients below 1e-4 and .008 (g and beta .02).
    Cost: about 2 B T HV (2 C K log2 C + 3 K V + 2 C V) flops; q, k, v, g are read and o is written once.
    Source: Kimi Linear (2025), section 3; the anchored products and the joined inverse are described in `tile`.
    """
    B, H, HV, K, V = _check(q, k, v, g, beta, scale, cu_seqlens, gate_lower_bound)
    check_initial_state(initial_state, (B if cu_seqlens is None else cu_seqlens.shape[0] - 1, HV, K, V))
    check_chunk_size(chunk_size)
    implementation = choose_implementation(implementation, _IMPLEMENTATIONS, on_tpu="pallas")
    scale = K**-0.5 if scale is None else scale
    dtype = operand_dtype(q.dtype, k.dtype, v.dtype) if implementation == "pallas" else jnp.dtype(jnp.float32)
    base, exact = (tile.base_block(gate_lower_bound, x) for x in (dtype, jnp.float32))
    tensors = *(x.astype(dtype) for x in (q, k, v)), *(x.astype(jnp.float32) for x in (g, beta))
    state = None if initial_state is None else jnp.swapaxes(initial_state.astype(jnp.float32), -1, -2)
    if implementation == "xla":
        o, final_state = _xla(
            *tensors, scale, state, cu_seqlens, output_final_state, use_qk_l2norm_in_kernel, chunk_size, base
        )
        return o.astype(v.dtype), final_state
    if max(K, V) > MOST_CHANNELS:
        raise NotImplementedError(
            f'"pallas" takes K and V up to {MOST_CHANNELS}; got {K} and {V}; use implementation="xla".'
        )
    config = config or tiles.default_for(H, HV, chunk_size, pad_lanes(K), pad_lanes(V), dtype.itemsize)
    _check_config(config, H, HV)
    inside, after = split_scale(scale)
    o, final_state = _pallas(
        *tensors, state, cu_seqlens, inside, output_final_state, use_qk_l2norm_in_kernel, chunk_size, base, exact,
        config,
    )  # fmt: skip
    return scaled(o, after).astype(v.dtype), final_state


def _final(state, chunks, start):
    """Return the final states as [N, HV, K, V]: those of empty sequences are their initial ones."""
    start = jnp.zeros_like(state) if start is None else start
    return jnp.swapaxes(jnp.where(chunks.empty[:, None, None, None], start, state), -1, -2)


@functools.partial(jax.jit, static_argnums=(8, 9, 10, 11))
def _xla(q, k, v, g, beta, scale, state, cu_seqlens, output_final_state, normalise, C, base):
    B, T, HV, _ = v.shape
    stream = cu_seqlens is not None and state is None and not output_final_state
    # What padding holds must not matter, not even NaN.
    q, k, v, g, beta = (zero_padding(x, cu_seqlens) for x in (q, k, v, g, beta))
    q, k = (l2norm(q), l2norm(k)) if normalise else (q, k)
    q, k = (jnp.repeat(x, HV // x.shape[2], axis=2) for x in (q * scale, k))
    chunks = Chunking(B, T, C, None if stream else cu_seqlens)
    batch = B if cu_seqlens is None else 1

    def steps(x):
        """Return tokens as [steps, batch * heads, C, ...]."""
        x = chunks.split(x)
        x = jnp.moveaxis(x.reshape(batch, -1, *x.shape[1:]), 0, 1)
        return x.reshape(x.shape[0], batch * HV, *x.shape[3:])

    tables, start = xla.Tables(), state
    if stream:
        masks = stream_masks(T, C, cu_seqlens)
        tables = xla.Tables(same=masks.same, carried=masks.carried, ending=masks.ending, through=masks.through)
    elif cu_seqlens is not None:
        tables = xla.Tables(first=chunks.first, sequence=chunks.sequence)
    elif state is not None:
        start = state.reshape(B * HV, *state.shape[2:])
    keep = cu_seqlens is not None and output_final_state
    q, k, v, g, beta = map(steps, (q, k, v, g, beta))
    o, last, states = xla.chunk_kda(q, k, v, g, beta, start, tables, base, keep)
    o = jnp.moveaxis(o.reshape(o.shape[0], batch, HV, *o.shape[2:]), 1, 0)
    o = chunks.merge(o.reshape(-1, *o.shape[2:]))
    if stream:
        return zero_padding(o, cu_seqlens), None
    if not output_final_state:
        return o, None
    last = last.reshape(B, HV, *last.shape[1:]) if states is None else states[chunks.final_chunk]
    return o, _final(last, chunks, state)


@functools.partial(jax.jit, static_argnums=(7, 8, 9, 10, 11, 12, 13))
def _pallas(q, k, v, g, beta, state, cu_seqlens, scale, output_final_state, normalise, C, base, backward_base, config):
    B, T, H, K = k.shape
    HV, V = v.shape[2:]
    stream = cu_seqlens is not None and state is None and not output_final_state
    chunks = Chunking(B, T, C, None if stream else cu_seqlens)
    NC = chunks.NC

    def rows(x):
        """Return tokens [B, T, heads, D] as rows [NC C, heads D], D padded to whole lanes."""
        x = jnp.pad(x, ((0, 0), (0, 0), (0, 0), (0, pad_lanes(x.shape[-1]) - x.shape[-1])))
        return chunks.spread(x).reshape(NC * C, -1)

    owner, opening = None, chunks.sequence
    if stream:
        token = jnp.arange(NC * C, dtype=jnp.int32)
        owner = jnp.searchsorted(cu_seqlens[1:], token, side="right").astype(jnp.int32).reshape(NC, 1, C)
        opening = jnp.concatenate([owner[:1, 0, 0], owner[:-1, 0, -1]])
    if state is not None:
        state = jnp.pad(state, ((0, 0), (0, 0), (0, pad_lanes(V) - V), (0, pad_lanes(K) - K)))
    x = kernel.Operands(
        chunks.first.astype(jnp.int32),
        chunks.sequence,
        chunks.last.astype(jnp.int32),
        opening,
        *map(rows, (q, k, v, g)),
        chunks.split(beta),
        owner,
        state,
    )
    static = kernel.Static(
        H=H, HV=HV, C=C, K=pad_lanes(K), V=pad_lanes(V), N=chunks.N, scale=scale, normalise=normalise, base=base,
        backward_base=backward_base, sequences=0 if cu_seqlens is None else cu_seqlens.shape[0] - 1, config=config,
    )  # fmt: skip
    o, last = fused(kernel.Operands(*vary_alike(*x)), static, output_final_state)
    o = chunks.gather(o.reshape(B, NC // B * C, HV, -1)[..., :V])
    if not output_final_state:
        return o, None
    return o, _final(last, chunks, state)[:, :, :K, :V]


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
      v: values [B, T, HV, V], likewise.
      g: log decay per channel [B, T, HV, K] in nats, <= 0, any strength.
      beta: step sizes [B, T, HV].
      scale, output_final_state, use_qk_l2norm_in_kernel, cu_seqlens: as in `fused_chunk_kda`.
      gate_lower_bound: as there; it changes nothing here.
      initial_state: [N, HV, K, V], or a pool [slots, HV, K, V] with state_indices; None for zeros. A pool that is not
        float32 is copied.
      state_indices: int32 [N], traced: the slot of every sequence. Slots must be distinct and exist; the values are
        not checked.
      has_initial_state: bool [N], traced: False where a sequence starts from zero, whatever its slot holds, as in a
        slot that was freed; None for True.
      implementation: "pallas" (TPU kernel, interpreted elsewhere), "xla" (plain JAX, also the gradient of
        "pallas"), None (the best for the backend).

    Returns:
      o [B, T, HV, V] in the type of v, and the states float32 in the shape of initial_state, None unless asked for.
      Slots that are not named keep every bit.

    Raises:
      ValueError: an argument has the wrong rank, shape or type.
      NotImplementedError: "pallas" with more tokens or larger states than fit into VMEM.

    Accuracy: 5e-7 relative to the recurrence in float64; everything is computed in float32, as sums.
    Cost: 7 B T HV K V flops; every state is read and written once.
    Source: Kimi Linear (2025).
    """
    B, H, HV, K, V = _check(q, k, v, g, beta, scale, cu_seqlens, gate_lower_bound)
    N = B if cu_seqlens is None else cu_seqlens.shape[0] - 1
    check_slots(initial_state, state_indices, has_initial_state, N, HV, K, V)
    on_tpu = "pallas" if decode_fits(q, k, v, g, beta) else "xla"
    o, states = decode(
        q, k, v, g, beta, K**-0.5 if scale is None else scale, initial_state, cu_seqlens, state_indices,
        has_initial_state, normalise=use_qk_l2norm_in_kernel, name="recurrent_kda_fwd",
        implementation=choose_implementation(implementation, _IMPLEMENTATIONS, on_tpu),
    )  # fmt: skip
    return o, states if output_final_state else None
