"""The contract: documentation, argument checks and the choice of implementation."""

import functools
import numbers
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from chunkwise.kda import config as tiles
from chunkwise.kda import kernel, kernel_bwd, tile, vjp, xla
from chunkwise.shared import compat
from chunkwise.shared.kernels import launcher, layout, matmul, packed, pools, remat
from chunkwise.shared.operators import arguments, checks, chunked, context, decode, gates, serving

# The kernels keep whole states of a head in fast memory.
MOST_CHANNELS = 256


def check_gate_lower_bound(gate_lower_bound) -> None:
    """Check the promise about the gates: None or a number, which cannot be traced."""
    number = isinstance(gate_lower_bound, numbers.Real) and not isinstance(gate_lower_bound, bool)
    checks.check(
        gate_lower_bound is None or (number and gate_lower_bound <= 0),
        f"`gate_lower_bound` must be None or a number <= 0{checks.when_built(gate_lower_bound)}; got "
        f"{checks.shown(gate_lower_bound)}.",
    )


def _check(x: arguments.Arguments, options: arguments.Options) -> None:
    """Check what the two operators share."""
    checks.check_delta_rule(x.q, x.k, x.v, x.g, x.beta, x.cu_seqlens, per_channel=True)
    check_gate_lower_bound(options.gate_lower_bound)


def _check_config(config: tiles.Config, H: int, HV: int) -> None:
    """Check that blocks of value heads hold whole groups that share a key head, or lie inside one."""
    for name, heads in (("heads", config.heads), ("heads_bwd", config.heads_bwd)):
        checks.check(
            launcher.divides_groups(heads, H, HV),
            f"`config.{name}` must divide {HV} value heads in whole groups of {HV // H} or inside of one; got {heads}.",
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
      gate_lower_bound: a promise that every g >= it, in nats; None or a number. Not the lower_bound below,
        which names a law. From -16.6 on one product replaces
        three where not all tensors are bfloat16, and in the backward. The result is the same, while entries of q and
        k stay below 2^31: they meet factors of up to 2^96.
      use_gate_in_kernel: g is the raw gate, and the decay is -exp(A_log) softplus(g + dt_bias), or with a lower_bound
        lower_bound * sigmoid(exp(A_log) (g + dt_bias)), in float32; static. The kernels do it themselves: raw gates are
        read in their type, and no decay is written. With bfloat16 tensors the forward kernel takes softplus up to 6e-8.
      A_log: [HV], any of these types; needed with use_gate_in_kernel and None without it, as the next two.
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
      implementation: "fused" (one TPU kernel a direction, interpreted elsewhere), "xla" (plain JAX), None (the best
        for the backend).
      sharding: how v is split over the devices of a mesh with automatic axes, a NamedSharding or a PartitionSpec;
        static. Over explicit axes the type of v says it. Rows, tokens, value heads and value channels may be split,
        also over several axes each; every device computes its part, and only gradients of arguments that devices
        share are sums over them.
      context_axis: the axis or axes of a mesh, inside a `shard_map`, over which T is split; static. Each device has
        consecutive tokens. cu_seqlens are those of all tokens, and states are those before the first and after the last
        token, the same on all devices. segment_ids are those of the device's tokens.
      config: tile sizes of the kernels.

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
    laws = gates.Laws(use_gate_in_kernel, lower_bound, use_beta_sigmoid_in_kernel, allow_neg_eigval)
    x = arguments.Arguments(
        q, k, v, g, beta, scale=scale, initial_state=initial_state, cu_seqlens=cu_seqlens, A_log=A_log, dt_bias=dt_bias,
        segment_ids=segment_ids,
    )  # fmt: skip
    devices = arguments.Devices(sharding, context_axis)
    options = arguments.Options(
        output_final_state, use_qk_l2norm_in_kernel, chunk_size, gate_lower_bound, laws, devices
    )
    return chunk(x, options, implementation, config=config)


def chunk(
    x: arguments.Arguments,
    options: arguments.Options,
    implementation: str | None,
    others: Mapping[str, chunked.Implementation] = {},
    config: tiles.Config | None = None,
    over_tokens: Mapping[str, chunked.Launches] = MappingProxyType({}),
) -> tuple[jax.Array, jax.Array | None]:
    """Check the arguments of `fused_chunk_kda` and run the implementation asked for.

    Args:
      x, options, implementation, config: the arguments.
      others: more implementations, by name. None means "fused" on a TPU if K and V fit, else "staged" if it is one of
        these, else "xla".
      over_tokens: what those of `others` have for tokens that are split over devices.
    """
    _check(x, options)
    checks.check_initial_state(x.initial_state, (x.num_states, *x.v.shape[2:3], x.q.shape[3], x.v.shape[3]))
    fits = max(x.q.shape[3], x.v.shape[3]) <= MOST_CHANNELS
    fused: Any = functools.partial(_fused, config=config)
    summary: Any = functools.partial(_summary, config=config)
    state_gradient: Any = functools.partial(_state_gradient, config=config)
    known = {"fused": fused, "xla": _xla, **others}
    on_tpu = "fused" if fits else "staged" if "staged" in others else "xla"
    own = {"fused": chunked.Launches(fused, summary, state_gradient), "xla": chunked.Launches(_xla, _xla_summary)}
    return chunked.run_chunked(
        x, options, implementation, known, on_tpu, raw_gates=("fused",), segmented=("fused",),
        over_tokens={**own, **over_tokens},
    )  # fmt: skip


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
    _check(x, options)
    forms = serving.Forms(_pooled, {"xla": _xla, **others}, chunk_states, raw_gates=True)
    fits = max(x.q.shape[3], x.v.shape[3]) <= MOST_CHANNELS
    return serving.run_ragged(x, slots, options, implementation, forms, fits, "recurrent_kda_fwd")


def _transposed(states: jax.Array | None) -> Any:
    """Return the user's states [N, HV, K, V] as the kernels hold them, [N, HV, V, K] float32, or back."""
    return None if states is None else jnp.swapaxes(states.astype(jnp.float32), -1, -2)


def _xla(
    x: arguments.Arguments, options: arguments.Options, kept: jax.Array | None = None
) -> tuple[jax.Array, jax.Array | None]:
    return xla.run(*_exact(x, options), kept)


@functools.partial(jax.jit, static_argnums=1)
def _xla_summary(x: arguments.Arguments, options: arguments.Options) -> context.Summary:
    """Return what the tokens do to a state, and the inverses of all chunks, which `_xla` and its gradient take."""
    x, static = _exact(x, options)
    return context.beside_identity(lambda y: xla.states_after(y, static), x, widest=None)


def _exact(x: arguments.Arguments, options: arguments.Options) -> tuple[arguments.Arguments, xla.Static]:
    """Return what the plain form gets for checked arguments."""
    base = tile.base_block(options.gate_lower_bound, jnp.float32)
    scale = jnp.asarray(x.scale, jnp.float32)
    static = xla.Static(options.chunk_size, bool(options.normalise), bool(options.output_final_state), base)
    return x._replace(scale=scale), static


class Kept(NamedTuple):
    """What the launch that makes states alone keeps for the operator and for both of its gradients.

    Attributes:
      X, scores: packed, as `kernel.launch` returns them.
    """

    X: jax.Array
    scores: jax.Array


def _fused(
    x: arguments.Arguments, options: arguments.Options, kept: Kept | None = None, *, config: tiles.Config | None
) -> tuple[jax.Array, jax.Array | None]:
    """Run the kernels on checked arguments; `kept` comes from `_summary` of the same tokens."""
    inside, after = launcher.split_scale(x.scale)
    static = _static(x, options, config, inside)
    o, final_state = _launch(x._replace(scale=None), static, bool(options.output_final_state), kept)
    return launcher.scaled(o, after).astype(x.v.dtype), final_state


def _summary(x: arguments.Arguments, options: arguments.Options, *, config: tiles.Config | None) -> context.Summary:
    """Return what the tokens do to a state, and what `_fused` and its gradients need not make again."""
    inside, _ = launcher.split_scale(x.scale)
    run = lambda x: _launch_states(x, _static(x, options, config, inside))
    return context.beside_identity(run, x._replace(scale=None))


def _state_gradient(
    x: arguments.Arguments,
    options: arguments.Options,
    kept: Kept,
    do: jax.Array,
    dstates: jax.Array,
    *,
    config: tiles.Config | None,
) -> jax.Array:
    """Return the gradient of the initial states alone, from the cotangents of `_fused`."""
    inside, after = launcher.split_scale(x.scale)
    static = _static(x, options, config, inside)
    return _launch_back(x._replace(scale=None), static, kept, launcher.scaled(do, after), dstates)


def _pooled(x: arguments.Arguments, options: arguments.Options, routes: pools.Routes) -> tuple[jax.Array, jax.Array]:
    """Run the kernel on checked arguments from a pool of states, `x.initial_state`, and into it."""
    inside, after = launcher.split_scale(x.scale)
    static = _static(x, options, None, inside)
    o, pool = _launch_pooled(x._replace(scale=None), static, options.block_size, routes)
    return launcher.scaled(o, after).astype(x.v.dtype), pool


def _static(
    x: arguments.Arguments, options: arguments.Options, config: tiles.Config | None, scale: float
) -> kernel.Static:
    """Return what the kernels are told of checked arguments."""
    B, T, H, K = x.q.shape
    HV, V = x.v.shape[2:]
    if max(K, V) > MOST_CHANNELS:
        raise NotImplementedError(
            f'"fused" takes K and V up to {MOST_CHANNELS}; got {K} and {V}; use implementation="xla".'
        )
    C, dtype = options.chunk_size, matmul.operand_dtype(x.q.dtype, x.k.dtype, x.v.dtype)
    config = config or tiles.default_for(H, HV, C, packed.pad_lanes(K), packed.pad_lanes(V), dtype.itemsize)
    _check_config(config, H, HV)
    is_packed, N = x.cu_seqlens is not None, x.num_states
    with_states = x.with_state or options.output_final_state
    pieces, NT = is_packed and with_states, -(-T // C)
    # What pads fewer tokens than a chunk is zeros, of which a law makes decays.
    selects = (T if options.laws.use_gate_in_kernel else max(T, C)) % C > 0
    return kernel.Static(
        B=B, T=max(T, C), selects=selects, H=H, HV=HV, K=packed.pad_lanes(K), V=packed.pad_lanes(V), C=C, N=N,
        steps=NT + N * pieces, scale=scale, normalise=bool(options.normalise), pieces=pieces, config=config,
        with_state=x.with_state, head_sizes=(K, V),
        base=tile.base_block(options.gate_lower_bound, dtype),
        backward_base=tile.base_block(options.gate_lower_bound, jnp.float32),
        lower_bound=options.laws.lower_bound,
    )  # fmt: skip


def _steps(x: arguments.Arguments, static: kernel.Static, with_states: bool) -> layout.Steps:
    return layout.make_steps(static.B, x.q.shape[1], static.C, x.cu_seqlens, with_states, x.segment_ids)


@functools.partial(jax.jit, static_argnums=(1, 2))
def _launch(
    x: arguments.Arguments, static: kernel.Static, output_final_state: bool, kept: Kept | None
) -> tuple[jax.Array, jax.Array | None]:
    """Bring the user's arrays into the layout of the kernels and their results back."""
    T, (K, V) = x.q.shape[1], static.head_sizes
    steps = _steps(x, static, x.with_state or output_final_state)
    o, states = vjp.fused(_lay_out(x, static, steps, kept=kept), static, output_final_state)
    return layout.from_lanes(o, static.HV, V, T), None if states is None else _transposed(states[..., :V, :K])


@functools.partial(jax.jit, static_argnums=1)
def _launch_states(x: arguments.Arguments, static: kernel.Static) -> tuple[jax.Array, Kept]:
    """Run the kernel that only takes states through the tokens; they may have more channels than `x.v`."""
    S: Any = x.initial_state
    operands = _lay_out(x, static, _steps(x, static, True))
    out = kernel.launch(operands, static, ("ht", "X", "scores"))
    return _transposed(out["ht"][..., : S.shape[3], : S.shape[2]]), remat.keep(Kept(out["X"], out["scores"]))


@functools.partial(jax.jit, static_argnums=1)
def _launch_back(
    x: arguments.Arguments, static: kernel.Static, kept: Kept, do: jax.Array, dstates: jax.Array
) -> jax.Array:
    """Run the reverse kernel for the gradient of the initial states alone."""
    K, V = static.head_sizes
    given: dict[str, Any] = _lay_out(x, static, _steps(x, static, True), kept=kept)._asdict()
    given |= dict(
        h=None,
        W=None,
        do=layout.to_lanes(do.astype(given["v"].dtype), static.T),
        dht=layout.pad_states(_transposed(dstates)),
    )
    operands = kernel_bwd.Operands(*compat.vary_alike(*(given[name] for name in kernel_bwd.Operands._fields)))
    return _transposed(kernel_bwd.launch(operands, static, ("dh0",))["dh0"][..., :V, :K])


@functools.partial(jax.jit, static_argnums=(1, 2))
def _launch_pooled(
    x: arguments.Arguments, static: kernel.Static, block_size: int | None, routes: pools.Routes
) -> tuple[jax.Array, jax.Array]:
    """Run the forward kernel from a pool of states and into it."""
    pool: Any = x.initial_state
    T = x.q.shape[1]
    steps = layout.pool_steps(T, static.C, routes, block_size)
    operands = _lay_out(x._replace(initial_state=None), static, steps, pool)
    out = kernel.launch(operands, static._replace(steps=steps.table.shape[1]), ("o", "pool_out"))
    return layout.from_lanes(out["o"], static.HV, x.v.shape[3], T), out["pool_out"]


def _lay_out(
    x: arguments.Arguments,
    static: kernel.Static,
    steps: layout.Steps,
    pool: jax.Array | None = None,
    kept: Kept | None = None,
) -> kernel.Operands:
    """Bring the user's arrays into the layout of the kernels; JAX transposes this for the backward."""
    dtype = matmul.operand_dtype(x.q.dtype, x.k.dtype, x.v.dtype)
    g, law = x.g.astype(jnp.float32), None
    if x.A_log is not None:
        # Raw gates stay as narrow as they are, but no TPU loads float16.
        g = x.g if x.g.dtype == jnp.bfloat16 else g
        law = jnp.stack(gates.lay_out_law(x.A_log, x.dt_bias, g.shape[2:]))  # [2, HV, K]
        law = layout.to_lanes(law[None], 2)[0]
    operands = kernel.Operands(
        *steps,
        *(layout.to_lanes(y.astype(dtype), static.T) for y in (x.q, x.k, x.v)),
        layout.to_lanes(g, static.T),
        layout.to_rows(x.beta.astype(jnp.float32), static.C),
        layout.pad_states(_transposed(x.initial_state)),
        law,
        pool,
        *(kept or (None, None)),
    )
    return kernel.Operands(*compat.vary_alike(*operands))


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
      use_gate_in_kernel, A_log, dt_bias, lower_bound, use_beta_sigmoid_in_kernel, allow_neg_eigval: likewise.
      gate_lower_bound: as there; it changes nothing here.
      initial_state: [N, HV, K, V], or a pool [slots, HV, K, V] with state_indices, of any floating type; None for
        zeros.
      state_indices: int32 [N], traced: the slot of every sequence. Slots must be distinct and exist; the values are
        not checked. A sequence with a negative slot starts from zeros and its state is dropped; negative slots are
        neither read nor written and may repeat.
      has_initial_state: bool [N], traced: False if a sequence starts from zeros whatever its slot holds, as in a slot
        that was freed; None for True.
      implementation: "fused" (one TPU kernel, interpreted elsewhere), "xla" (plain JAX, also the gradient of
        "fused"), None (the best for the backend).
      sharding, context_axis: as in `fused_chunk_kda`. Devices that split the rows of a batch split
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
    laws = gates.Laws(use_gate_in_kernel, lower_bound, use_beta_sigmoid_in_kernel, allow_neg_eigval)
    x = arguments.Arguments(
        q, k, v, g, beta, scale=scale, initial_state=initial_state, cu_seqlens=cu_seqlens, A_log=A_log, dt_bias=dt_bias
    )
    devices = arguments.Devices(sharding, context_axis)
    options = arguments.Options(output_final_state, use_qk_l2norm_in_kernel, None, gate_lower_bound, laws, devices)
    _check(x, options)
    return decode.run_recurrent(
        x, arguments.Slots(state_indices, has_initial_state), options, implementation, "recurrent_kda_fwd"
    )
