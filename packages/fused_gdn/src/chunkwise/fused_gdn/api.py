"""The contract: documentation, argument checks, and the choice of implementation."""

import functools
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from chunkwise.fused_gdn import config as tiles
from chunkwise.fused_gdn import kernel, kernel_bwd, kernel_map, vjp, xla
from chunkwise.shared import compat
from chunkwise.shared.kernels import launcher, layout, matmul, packed, pools, remat
from chunkwise.shared.operators import arguments, checks, chunked, context, decode, gates, serving

# The kernels keep whole states of a head in fast memory.
MOST_CHANNELS = 256


def fused_chunk_gated_delta_rule(
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
    use_gate_in_kernel: bool = False,
    A_log: jax.Array | None = None,
    dt_bias: jax.Array | None = None,
    lower_bound: float | None = None,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    cu_seqlens: jax.Array | None = None,
    segment_ids: jax.Array | None = None,
    chunk_size: int | None = None,
    implementation: str | None = None,
    sharding: arguments.Sharding | None = None,
    context_axis: str | tuple[str, ...] | None = None,
    config: tiles.Config | None = None,
) -> tuple[jax.Array, jax.Array | None]:
    """Gated delta rule over whole sequences in one kernel launch, differentiable.

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
        lower_bound * sigmoid(exp(A_log) (g + dt_bias)), in float32; static.
      A_log: [HV], any of these types; needed with use_gate_in_kernel and None without it, as the next two.
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
      implementation: "fused" (one Pallas TPU kernel for a direction, interpreted elsewhere), "xla" (plain JAX, in
        chunks of at most 32), None ("fused" on a TPU if K and V are at most 256, else "xla").
      sharding: how v is split over the devices of a mesh with automatic axes, a NamedSharding or a PartitionSpec;
        static. Over explicit axes the type of v says it. Rows, tokens, value heads and value channels may be split,
        also over several axes each; every device computes its part, and only gradients of arguments that devices
        share are sums over them.
      context_axis: the axis or axes of a mesh, inside a `shard_map`, over which T is split; static. Each device has
        consecutive tokens. cu_seqlens are those of all tokens, and states are those before the first and after the last
        token, the same on all devices. segment_ids are those of the device's tokens.
      config: tile sizes of the kernels. A group of value heads too large for a step is cut, and q and k are repeated.

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
    laws = gates.Laws(use_gate_in_kernel, lower_bound, use_beta_sigmoid_in_kernel, allow_neg_eigval)
    x = arguments.Arguments(
        q, k, v, g, beta, scale=scale, initial_state=initial_state, cu_seqlens=cu_seqlens, A_log=A_log, dt_bias=dt_bias,
        segment_ids=segment_ids,
    )  # fmt: skip
    options = arguments.Options(
        output_final_state,
        use_qk_l2norm_in_kernel,
        chunk_size,
        laws=laws,
        devices=arguments.Devices(sharding, context_axis),
    )
    return chunk(x, options, implementation, config=config)


def chunk(
    x: arguments.Arguments,
    options: arguments.Options,
    implementation: str | None,
    others: Mapping[str, chunked.Implementation] = MappingProxyType({}),
    config: tiles.Config | None = None,
    over_tokens: Mapping[str, chunked.Launches] = MappingProxyType({}),
) -> tuple[jax.Array, jax.Array | None]:
    """Check the arguments of `fused_chunk_gated_delta_rule` and run the implementation asked for.

    Args:
      x, options, implementation, config: the arguments.
      others: more implementations, by name. None means "fused" on a TPU if K and V fit, else "staged" if it is one of
        these, else "xla".
      over_tokens: what those of `others` have for tokens that are split over devices.
    """
    _, _, _, HV, K, V = checks.check_delta_rule(x.q, x.k, x.v, x.g, x.beta, x.cu_seqlens)
    checks.check_initial_state(x.initial_state, (x.num_states, HV, K, V))
    slower = "staged" if "staged" in others else "xla"
    fused: Any = functools.partial(_fused, config=config)
    summary: Any = functools.partial(_summary, config=config)
    state_gradient: Any = functools.partial(_state_gradient, config=config)
    known = {"fused": fused, "xla": _xla, **others}
    on_tpu = "fused" if max(K, V) <= MOST_CHANNELS else slower
    own = {"fused": chunked.Launches(fused, summary, state_gradient), "xla": chunked.Launches(_xla, _xla_summary)}
    return chunked.run_chunked(
        x, options, implementation, known, on_tpu, segmented=("fused",), over_tokens={**own, **over_tokens}
    )


def ragged(
    x: arguments.Arguments,
    slots: arguments.Slots,
    options: arguments.Options,
    implementation: str | None,
    others: Mapping[str, chunked.Implementation] = MappingProxyType({}),
    chunk_states: Mapping[str, serving.ChunkStates] = MappingProxyType({}),
) -> tuple[jax.Array, jax.Array]:
    """Check the arguments of a serving step and run it; `x.initial_state` is the pool.

    Args:
      x, slots, options, implementation: the arguments.
      others, chunk_states: more implementations, by name, and what they know of the states before chunks.
    """
    checks.check_delta_rule(x.q, x.k, x.v, x.g, x.beta, x.cu_seqlens)
    forms = serving.Forms(_pooled, {"xla": _xla, **others}, chunk_states)
    fits = max(x.q.shape[3], x.v.shape[3]) <= MOST_CHANNELS
    return serving.run_ragged(x, slots, options, implementation, forms, fits, "recurrent_gated_delta_rule_fwd")


@functools.partial(jax.jit, static_argnums=1)
def _xla(
    x: arguments.Arguments, options: arguments.Options, kept: jax.Array | None = None
) -> tuple[jax.Array, jax.Array | None]:
    return xla.gated_delta_rule(x._replace(scale=jnp.asarray(x.scale, jnp.float32)), options, kept)


@functools.partial(jax.jit, static_argnums=1)
def _xla_summary(x: arguments.Arguments, options: arguments.Options) -> context.Summary:
    """Return what the tokens do to a state, and the inverses of all chunks, which `_xla` and its gradient take."""
    return context.beside_identity(lambda y: xla.states_after(y, options), x, widest=None)


def _config(x: arguments.Arguments, options: arguments.Options, config: tiles.Config | None) -> tiles.Config:
    """Return the tile sizes for these arguments, checked."""
    (H, K), (HV, V) = x.q.shape[2:], x.v.shape[2:]
    if max(K, V) > MOST_CHANNELS:
        raise NotImplementedError(
            f'"fused" takes K and V up to {MOST_CHANNELS}; got {K} and {V}; use implementation="xla".'
        )
    config = config or tiles.default_for(H, HV, options.chunk_size, packed.pad_lanes(K), packed.pad_lanes(V))
    for name in ("heads", "heads_bwd"):
        heads = getattr(config, name)
        checks.check(
            heads >= 1 and HV % heads == 0,
            f"`config.{name}` must divide {HV} value heads; got {heads}.",
        )
    return config


class Given(NamedTuple):
    """What the launch that makes states alone gives to the operator behind it, see `Operands`; u and w with the map."""

    X: jax.Array
    u: jax.Array | None = None
    w: jax.Array | None = None


def _fused(
    x: arguments.Arguments, options: arguments.Options, given: Given | None = None, *, config: tiles.Config | None
) -> tuple[jax.Array, jax.Array | None]:
    """Run the kernels on checked arguments; `given` comes from `_summary` of the same tokens."""
    inside, after = launcher.split_scale(x.scale)
    o, final_state = _launch(x._replace(scale=None), options, inside, _config(x, options, config), given)
    return launcher.scaled(o, after), final_state


def _summary(x: arguments.Arguments, options: arguments.Options, *, config: tiles.Config | None) -> context.Summary:
    """Return what the tokens do to a state, the inverses of all chunks, and what else `_fused` takes."""
    x, config = x._replace(scale=None), _config(x, options, config)
    if sum(packed.pad_lanes(n) for n in (x.q.shape[3], x.v.shape[3])) > MOST_CHANNELS:
        summary = context.beside_identity(lambda x: _launch_states(x, options, config, False)[:2], x, widest=0)
        return summary._replace(given=Given(summary.kept))
    return _launch_states(x, options, config, True)


def _pooled(x: arguments.Arguments, options: arguments.Options, routes: pools.Routes) -> tuple[jax.Array, jax.Array]:
    """Run the kernel on checked arguments from a pool of states, `x.initial_state`, and into it."""
    inside, after = launcher.split_scale(x.scale)
    o, pool = _launch_pooled(x._replace(scale=None), options, inside, _config(x, options, None), routes)
    return launcher.scaled(o, after), pool


def _state_gradient(
    x: arguments.Arguments,
    options: arguments.Options,
    kept: jax.Array,
    do: jax.Array,
    dstates: jax.Array,
    *,
    config: tiles.Config | None,
) -> jax.Array:
    """Return the gradient of the initial states alone, from the cotangents of `_fused`."""
    inside, after = launcher.split_scale(x.scale)
    config = _config(x, options, config)
    return _launch_back(x._replace(scale=None), options, inside, config, kept, launcher.scaled(do, after), dstates)


class LaidOut(NamedTuple):
    """The arguments of an operator on their way to a kernel.

    Attributes:
      static: what the kernel is built for.
      tensors: the user's arrays, key heads repeated.
      operands: the same in the layout of the kernels.
    """

    static: kernel.Static
    tensors: vjp.Tensors
    operands: kernel.Operands


def _lay_out(
    x: arguments.Arguments, options: arguments.Options, scale: float, config: tiles.Config, heads: int, given: Given | None = None,
    routes: pools.Routes | None = None,
) -> LaidOut:  # fmt: skip
    """Bring the user's arrays into the layout of a launch of so many value heads a step.

    JAX transposes all of this for the backward: it sums the gradients of repeated keys, for example. With routes the
    states are those of a pool, which stays as it is.
    """
    (B, T, H, K), (HV, V), C = x.q.shape, x.v.shape[2:], options.chunk_size
    is_packed, with_states = x.cu_seqlens is not None, x.with_state or options.output_final_state
    # Groups of value heads that are too large for a step are cut, and each part has its own key head.
    repeats = tiles.key_repeats(H, HV, config)
    q, k = (jnp.repeat(y, repeats, axis=2) if repeats > 1 else y for y in (x.q, x.k))
    pieces = is_packed and with_states
    if routes is None:
        steps = layout.make_steps(B, T, C, x.cu_seqlens, with_states, x.segment_ids)
    else:
        steps = layout.pool_steps(T, C, routes, options.block_size)
    static = kernel.Static(
        B=B, T=max(T, C), H=H * repeats, HV=HV, K=packed.pad_lanes(K), V=packed.pad_lanes(V), C=C, N=x.num_states,
        steps=steps.table.shape[1] // B, scale=scale, normalise=bool(options.normalise), pieces=pieces,
        config=config,
    )  # fmt: skip
    table, owner = steps
    p = static.shape(config.heads).p
    if owner is not None:
        owner = jnp.tile(owner, (1, 1, p))
    pool = None if routes is None else x.initial_state
    tensors = vjp.Tensors(q, k, x.v, x.g, x.beta, x.initial_state if pool is None else None)
    operands = vjp.lay_out(tensors, (table, owner), matmul.operand_dtype(q.dtype, k.dtype, x.v.dtype), static, heads)
    if given is not None:
        operands = operands._replace(X=vjp.repacked(given.X, p), u=given.u, w=given.w)
    operands = operands._replace(pool=pool)
    return LaidOut(static, tensors, operands)


def _user_states(states: jax.Array, otherwise: jax.Array | None, x: arguments.Arguments) -> jax.Array:
    """Return states of a kernel as the user has them; no kernel visits an empty sequence."""
    channels = x.v.shape[3] if x.initial_state is None else x.initial_state.shape[3]
    return layout.unless_empty(states, otherwise, x.cu_seqlens)[:, :, : x.q.shape[3], :channels]


@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def _launch(
    x: arguments.Arguments, options: arguments.Options, scale: float, config: tiles.Config, given: Given | None
) -> tuple[jax.Array, jax.Array | None]:
    """Run the operator, differentiable."""
    static, tensors, operands = _lay_out(x, options, scale, config, config.heads, given)
    *varied, cu_seqlens = compat.vary_alike(*operands, x.cu_seqlens)
    operands = operands._make(varied)
    o, states = vjp.fused(operands, cu_seqlens, static, tensors.types(), bool(options.output_final_state))
    o = layout.from_lanes(o, static.HV, x.v.shape[3], x.v.shape[1]).astype(x.v.dtype)
    return o, None if states is None else _user_states(states, operands.h0, x)


@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def _launch_states(
    x: arguments.Arguments, options: arguments.Options, config: tiles.Config, with_map: bool
) -> context.Summary:
    """Run the kernel that only takes states through the tokens, and with the map also the identity."""
    static, _, operands = _lay_out(x, options, 1.0, config, config.heads)
    out = kernel_map.launch(operands._make(compat.vary_alike(*operands)), static, with_map)
    K, M, X = x.q.shape[3], out.get("M"), remat.keep(out["X"])
    # Of an empty sequence nobody asks for the map.
    M = None if M is None else M[:, :, :K, :K]
    return context.Summary(_user_states(out["ht"], operands.h0, x), X, M, Given(X, out.get("u"), out.get("w")))


@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def _launch_pooled(
    x: arguments.Arguments, options: arguments.Options, scale: float, config: tiles.Config, routes: pools.Routes
) -> tuple[jax.Array, jax.Array]:
    """Run the forward kernel from a pool of states and into it."""
    static, _, operands = _lay_out(x, options, scale, config, config.heads, routes=routes)
    out = kernel.launch(operands._make(compat.vary_alike(*operands)), static, ("o", "pool"))
    o = layout.from_lanes(out["o"], static.HV, x.v.shape[3], x.v.shape[1]).astype(x.v.dtype)
    return o, out["pool"]


@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def _launch_back(
    x: arguments.Arguments, options: arguments.Options, scale: float, config: tiles.Config, kept: jax.Array, do: jax.Array,
    dstates: jax.Array,
) -> jax.Array:  # fmt: skip
    """Run the reverse kernel for the gradient of the initial states alone."""
    static, _, operands = _lay_out(x, options, scale, config, config.heads_bwd, Given(kept))
    do, dht = layout.to_lanes(do.astype(operands.v.dtype), static.T), layout.pad_states(dstates)
    operands = operands._replace(do=do, dht=dht)
    d = kernel_bwd.launch(operands._make(compat.vary_alike(*operands)), static, ("dh0",))["dh0"]
    # What an empty sequence gets, it gives back.
    return _user_states(d, dht, x)


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
    use_gate_in_kernel: bool = False,
    A_log: jax.Array | None = None,
    dt_bias: jax.Array | None = None,
    lower_bound: float | None = None,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    cu_seqlens: jax.Array | None = None,
    state_indices: jax.Array | None = None,
    has_initial_state: jax.Array | None = None,
    implementation: str | None = None,
    sharding: arguments.Sharding | None = None,
    context_axis: str | tuple[str, ...] | None = None,
) -> tuple[jax.Array, jax.Array | None]:
    """Gated delta rule token by token, the decode path: one new token or a few for every sequence, in one launch.

    The equation, arguments and results of `fused_chunk_gated_delta_rule`, less chunk_size. For serving, initial_state
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
        `fused_chunk_gated_delta_rule`.
      cu_seqlens: int32 [N + 1], traced: sequence n has the tokens cu_seqlens[n] to cu_seqlens[n + 1] - 1. B must be 1.
      state_indices: int32 [N], traced: the slot of every sequence. Slots must be distinct and exist; the values are
        not checked. A sequence with a negative slot starts from zeros and its state is dropped: no slot is read or
        written for it. Negative slots may repeat.
      has_initial_state: bool [N], traced: False if a sequence starts from zeros whatever its slot holds, as in a slot
        that was freed; None for True.
      implementation: "fused" (one Pallas TPU kernel, interpreted elsewhere), "xla" (plain JAX, also the gradient of
        "fused"), None ("fused" on a TPU if the tokens and states fit into its fast memory, else "xla").
      sharding, context_axis: as in `fused_chunk_gated_delta_rule`. Devices that split the rows of a batch split
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
    checks.check_delta_rule(q, k, v, g, beta, cu_seqlens)
    laws = gates.Laws(use_gate_in_kernel, lower_bound, use_beta_sigmoid_in_kernel, allow_neg_eigval)
    x = arguments.Arguments(
        q, k, v, g, beta, scale=scale, initial_state=initial_state, cu_seqlens=cu_seqlens, A_log=A_log, dt_bias=dt_bias
    )
    options = arguments.Options(
        output_final_state, use_qk_l2norm_in_kernel, laws=laws, devices=arguments.Devices(sharding, context_axis)
    )
    slots = arguments.Slots(state_indices, has_initial_state)
    return decode.run_recurrent(x, slots, options, implementation, "recurrent_gated_delta_rule_fwd")
