"""The contract: documentation, argument checks and the choice of implementation."""

import functools
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp

from chunkwise.fused_gla import config, vjp, xla
from chunkwise.shared.kernels import launcher, matmul, pools
from chunkwise.shared.operators import arguments, checks, chunked, context, serving


def fused_chunk_gla(
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
    sharding: arguments.Sharding | None = None,
    context_axis: str | tuple[str, ...] | None = None,
    config: config.Config | None = None,
) -> tuple[jax.Array, jax.Array | None]:
    """Return gated linear attention, simple (a gate per head) or with a gate per channel, in one launch per direction.

    In value head n, with key head n // (HV // H)::

        S_t = Diag(exp(g_t + g_gamma)) S_{t-1} + k_t v_t^T        o_t = scale S_t^T q_t

    Dims: B batch, T tokens, H query and key heads, HV value heads (a multiple of H), K and V key and value dimensions,
    C chunk size, N sequences (B, or those packed).

    Args:
      q, k: queries and keys [B, T, H, K], float32, bfloat16 or float16.
      v: values [B, T, HV, V], likewise. If all three are bfloat16, the kernels' products take bfloat16 operands, else
        float32 ones at full precision, as "xla" does; they accumulate in float32. States and gates are float32.
      g: log decay in nats, at most 0, -inf included: [B, T, HV] per head or [B, T, HV, K] per channel, of any of
        these types; None for no decay.
      g_gamma: constant log decay per head [HV] in nats, likewise, added to g. If its gradient is asked for, computed
        tiles enter bfloat16 products with 16 bits: it is one number for all tokens, and they cancel.
      scale: multiplies the output; defaults to K ** -0.5. A number, or a scalar array, traced or not.
      initial_state: [N, HV, K, V], likewise, or None for zeros.
      output_final_state: whether to return the final state; static.
      cu_seqlens: boundaries of a packed batch, int32 [N + 1], traced; B must be 1. Tokens from cu_seqlens[N] on are
        padding, may hold anything and give zeros. The values are checked outside of jit only.
      segment_ids: int32 [B, T], traced, instead of cu_seqlens and for any B: in every row the state starts anew where
        the id changes, and tokens of ids below 0 are padding, which may hold anything and give zeros. initial_state and
        final_state are then [B, HV, K, V]: before the first segment of a row and after its last. The cost is that of
        the same tokens without ids. NaN or infinity in one segment does not change a bit of the results of others under
        "fused"; elsewhere it may change their rounding.
      chunk_size: C, one of 16, 32, 64, 128, or None for the best; static.
      implementation: "fused" (one launch per direction, interpreted off TPU), "xla" (plain JAX), or None (the best for
        the backend and the sizes).
      sharding: how v is split over the devices of a mesh with automatic axes, a NamedSharding or a PartitionSpec;
        static. Over explicit axes the type of v says it. Rows, tokens, value heads and value channels may be split,
        also over several axes each; every device computes its part, and only gradients of arguments that devices
        share are sums over them.
      context_axis: the axis or axes of a mesh, inside a `shard_map`, over which T is split; static. Each device has
        consecutive tokens. cu_seqlens are those of all tokens, and states are those before the first and after the last
        token, the same on all devices. segment_ids are those of the device's tokens.
      config: tile sizes of the kernels.

    Returns:
      (o [B, T, HV, V] in the type of v, final_state [N, HV, K, V] float32 or None).

    Raises:
      ValueError: an argument has the wrong rank, shape or type.
      NotImplementedError: "fused", and a head is too large for fast memory; see `fits`.

    Differentiable once, in reverse, in every floating-point argument; "xla" by any transform of JAX.
    NaN or infinity in one sequence changes no bit of the others. It spoils the results of its own sequence from the
    chunk on in which it is, at boundaries of sequences those of other heads too.
    Accuracy: 3e-7 relative to the recurrence in float64 for float32 inputs, 3e-3 for bfloat16 inputs; any gate.
    Cost: 2 B T (H C K + HV C V + 2 HV K V) flops, with gates per channel HV C K instead of H C K, and one read of q, k,
      v and write of o; the backward reads q, k, v, do and one state every `num_steps` chunks, and writes dq, dk, dv. A
      group of value heads larger than a grid step writes float32 sums of dq and dk for every step. With states in or
      out a packed batch also pays for the state of every sequence.
    Source: Yang et al., Gated Linear Attention Transformers (2023), sections 3 and 4; Dao and Gu, Transformers are SSMs
      (2024), for a gate per head.
    """
    x = arguments.Arguments(q, k, v, g, None, g_gamma, scale, initial_state, cu_seqlens, segment_ids=segment_ids)
    options = arguments.Options(
        output_final_state, chunk_size=chunk_size, devices=arguments.Devices(sharding, context_axis)
    )
    return chunk(x, options, implementation, config=config)


def chunk(
    x: arguments.Arguments,
    options: arguments.Options,
    implementation: str | None = None,
    others: Mapping[str, chunked.Implementation] = {},
    config: config.Config | None = None,
) -> tuple[jax.Array, jax.Array | None]:
    """Do as `fused_chunk_gla`, with arguments in one tuple.

    Args:
      x: the arrays.
      options: the static arguments.
      implementation: as there, or the name of one of `others`.
      others: more implementations by name. "staged" is what None means on a TPU if the kernels do not fit.
      config: as there.
    """
    check_arguments(x)
    (H, K), (HV, V) = x.q.shape[2:], x.v.shape[2:]
    checks.check_initial_state(x.initial_state, (x.num_states, HV, K, V))
    C = checks.choose_chunk_size(options.chunk_size, "fused", x.q.shape[1])
    if config is not None:
        checks.check(
            all(launcher.divides_groups(n, H, HV) for n in (config.heads, config.heads_bwd)) and config.num_steps >= 1,
            f"`config` must have heads that divide HV = {HV} into whole groups of {HV // H} or parts of one, and at "
            f"least one step; got {config}.",
        )
    fit = config is not None or _default_config(x, C) is not None
    on_tpu = "fused" if fit else "staged" if "staged" in others else "xla"
    fused: Any = functools.partial(_fused, config=config)
    summary: Any = functools.partial(_summary, config=config)
    state_gradient: Any = functools.partial(_state_gradient, config=config)
    launches = chunked.Launches(lambda x, options, _: fused(x, options), summary, state_gradient)
    known = {"fused": fused, "xla": _xla, **others}
    return chunked.run_chunked(
        x, options, implementation, known, on_tpu, segmented=("fused",), over_tokens={"fused": launches}
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
    check_arguments(x)
    fit = _default_config(x, checks.choose_chunk_size(options.chunk_size, "fused", x.q.shape[1])) is not None
    forms = serving.Forms(_pooled, {"xla": _xla, **others}, chunk_states)
    kind = "gla" if x.g is not None and x.g.ndim == 4 else "simple_gla"
    return serving.run_ragged(x, slots, options, implementation, forms, fit, f"recurrent_{kind}_fwd")


def fits(
    q: jax.Array, k: jax.Array, v: jax.Array, g: jax.Array | None = None, chunk_size: int | None = None
) -> bool:  # fmt: skip
    """Return whether the kernels take these arguments of `fused_chunk_gla`, forward and backward; else "xla" must."""
    return (
        _default_config(arguments.Arguments(q, k, v, g), checks.choose_chunk_size(chunk_size, "fused", q.shape[1]))
        is not None
    )


def _default_config(x: arguments.Arguments, C: int) -> config.Config | None:
    (_, T, H, K), (HV, V) = x.q.shape, x.v.shape[2:]
    per_channel, size = (
        x.g is not None and x.g.ndim == 4,
        matmul.operand_dtype(x.q.dtype, x.k.dtype, x.v.dtype).itemsize,
    )
    return config.default_for(H, HV, K, V, C, -(-T // C), size, per_channel)


def check_arguments(x: arguments.Arguments) -> None:
    """Check the arrays of an operator, but for its states."""
    B, T, H, K = checks.check_array("k", x.k, "B T H K")
    checks.check_array("q", x.q, "B T H K", (B, T, H, K))
    HV = checks.check_array("v", x.v, "B T HV V", (B, T, None, None))[2]
    checks.check_heads(H, HV)
    checks.check_gates("g", x.g, (B, T, HV), K)
    if x.g_gamma is not None:
        checks.check_array("g_gamma", x.g_gamma, "HV", (HV,))
    checks.check_packed(x.cu_seqlens, B)


def _config(x: arguments.Arguments, options: arguments.Options) -> config.Config:
    config = _default_config(x, checks.choose_chunk_size(options.chunk_size))
    if config is None:
        raise NotImplementedError(
            f'"fused" keeps the states of a head in VMEM; K = {x.q.shape[3]} and V = {x.v.shape[3]} need more of it '
            f'than there is: use implementation="xla".'
        )
    return config


def _fused(
    x: arguments.Arguments, options: arguments.Options, config: config.Config | None
) -> tuple[jax.Array, jax.Array | None]:
    """Run the kernels on checked arguments."""
    inside, after = launcher.split_scale(x.scale)
    o, state = vjp.fused(x._replace(scale=None), inside, options, config or _config(x, options))
    return launcher.scaled(o, after), state


def _summary(x: arguments.Arguments, options: arguments.Options, config: config.Config | None) -> context.Summary:
    """Return what the tokens do to a state; nothing is kept for the operator, whose own work does not contain it."""
    states, decay = vjp.summary(x._replace(scale=None), options, config or _config(x, options))
    return context.Summary(states, M=decay)


def _state_gradient(
    x: arguments.Arguments,
    options: arguments.Options,
    kept: None,
    do: jax.Array,
    dstates: jax.Array,
    config: config.Config | None,
) -> jax.Array:
    """Return the gradient of the initial states alone, from the cotangents of `_fused`."""
    inside, after = launcher.split_scale(x.scale)
    config = config or _config(x, options)
    return vjp.state_gradient(x._replace(scale=None), inside, options, config, launcher.scaled(do, after), dstates)


def _pooled(x: arguments.Arguments, options: arguments.Options, routes: pools.Routes) -> tuple[jax.Array, jax.Array]:
    """Run the kernel on checked arguments from a pool of states, `x.initial_state`, and into it."""
    inside, after = launcher.split_scale(x.scale)
    o, pool = vjp.pooled(x._replace(scale=None), inside, options, _config(x, options), routes)
    return launcher.scaled(o, after), pool


@functools.partial(jax.jit, static_argnums=1)
def _xla(x: arguments.Arguments, options: arguments.Options) -> tuple[jax.Array, jax.Array | None]:
    """Run the plain form on checked arguments."""
    q, k, v = (y.astype(jnp.float32) for y in (x.q, x.k, x.v))
    # JAX would round the gradient of a bfloat16 operand, which is that of the scores and of the states.
    exact = x._replace(q=q, k=k, v=v, g=arguments.total_gate(x), scale=jnp.asarray(x.scale, jnp.float32))
    if x.initial_state is not None:
        # The states of the tiles are [V, K].
        exact = exact._replace(initial_state=jnp.swapaxes(x.initial_state.astype(jnp.float32), 2, 3))
    o, state = xla.gla(exact, options)
    return o.astype(x.v.dtype), None if state is None else jnp.swapaxes(state, 2, 3)
