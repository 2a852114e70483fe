"""The kernels as one differentiable function of their operands.

The operands are those of the launches, so JAX transposes what lies between them and the user's arrays: the flat view,
its padding and casts.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero

from chunkwise.fused_gla import config, kernel, kernel_bwd, unread
from chunkwise.shared import compat
from chunkwise.shared.kernels import chunking, launcher, layout, matmul, packed, pools, remat
from chunkwise.shared.operators import arguments


@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def fused(x: arguments.Arguments, scale: float, options: arguments.Options, config: config.Config):
    """Return (o [B, T, HV, V], final states [N, HV, K, V] or None) for checked arguments; `x.scale` is not read."""
    s, operands = _lay_out(x, scale, options, config)
    o, final = attend(s, operands)
    return layout.from_lanes(o, s.HV, s.widths[1], s.T), None if final is None else _user_states(s, final)


@functools.partial(jax.jit, static_argnums=(1, 2))
def summary(
    x: arguments.Arguments, options: arguments.Options, config: config.Config
) -> tuple[jax.Array, jax.Array | None]:
    """Return (final states [N, HV, K, V], decays [N, HV, K, 1]); `x.q` and `x.scale` are not read.

    The decays are those of a state over all tokens of its sequence, None for gates per head, which XLA sums up as fast.
    """
    s, operands = _lay_out(x, 1.0, options, config)
    results: Any = kernel.launch(_in_parts(s, x), operands, output=False, decay=s.per_channel)
    _, final, _, decay, _ = results
    return _user_states(s, final), None if decay is None else jnp.swapaxes(decay[..., : s.widths[0]], 2, 3)


@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def state_gradient(
    x: arguments.Arguments,
    scale: float,
    options: arguments.Options,
    config: config.Config,
    do: jax.Array,
    dfinal: jax.Array,
) -> jax.Array:
    """Return the gradient of the initial states alone; `x.scale` is not read.

    Args:
      x, scale, options, config: of `fused`.
      do, dfinal: the cotangents of its results.
    """
    dtype = matmul.operand_dtype(x.q.dtype, x.k.dtype, x.v.dtype)
    # Queries and the gradients of outputs act on the gradient of the state as keys and values act on the state.
    q = x.q.astype(dtype)
    x = x._replace(q=q, k=q, v=do.astype(dtype), initial_state=dfinal)
    s, operands = _lay_out(x, scale, options, config)
    return _user_states(s, kernel_bwd.launch_state(_in_parts(s, x), operands))


def _in_parts(s: kernel.Static, x: arguments.Arguments) -> kernel.Static:
    """Return a launch whose computed tiles have as many parts as the gradient of constant gates may ask for."""
    return s._replace(parts=1 if x.g_gamma is None else 2)


def _user_states(s: kernel.Static, states: jax.Array) -> jax.Array:
    """Return states [N, HV, V, K] of a kernel as the user has them, [N, HV, K, V] without padding."""
    K, V = s.widths
    return jnp.swapaxes(states[:, :, :V, :K], 2, 3)


@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def pooled(
    x: arguments.Arguments, scale: float, options: arguments.Options, config: config.Config, routes: pools.Routes
):
    """Return (o [1, T, HV, V], the pool) for checked arguments, of which `x.initial_state` is the pool."""
    pool: Any = x.initial_state
    s, operands = _lay_out(x._replace(initial_state=None), scale, options, config)
    table = layout.pool_steps(s.T, s.chunks * s.C, routes, options.block_size).table
    operands = operands._replace(table=table, pool=pool)
    s = s._replace(steps=table.shape[1], final=False)
    results: Any = kernel.launch(s, kernel.Operands(*compat.vary_alike(*operands)))
    o, *_, after = results
    return layout.from_lanes(o, s.HV, s.widths[1], s.T), after


def _lay_out(
    x: arguments.Arguments, scale: float, options: arguments.Options, config: config.Config
) -> tuple[kernel.Static, kernel.Operands]:
    """Bring the user's arrays into the layout of the kernels."""
    (B, T, H, K), (HV, V), C = x.q.shape, x.v.shape[2:], options.chunk_size
    assert C is not None
    per_channel, NT = x.g is not None and x.g.ndim == 4, chunking.num_chunks(T, C)
    chunks = launcher.largest_divisor(NT, config.num_steps)
    pieces = x.cu_seqlens is not None and (options.output_final_state or x.initial_state is not None)
    s = kernel.Static(
        B, T, H, HV, packed.pad_lanes(K), packed.pad_lanes(V), C, x.num_states, NT // chunks + pieces * x.num_states, chunks, scale,
        config,
        widths=(K, V),
        per_channel=per_channel,
        pieces=pieces,
        constant=x.g is None and x.cu_seqlens is None and x.segment_ids is None and T % C == 0,
        final=options.output_final_state,
    )  # fmt: skip
    g, gamma, states = x.g, x.g_gamma, x.initial_state
    if g is not None:
        g = layout.to_lanes(g, T) if per_channel else layout.to_rows(g.astype(jnp.float32), C)[:, :, :, None]
    gamma = None if gamma is None else gamma.astype(jnp.float32)[:, None, None]
    # The kernels' states are [V, K].
    states = None if states is None else layout.pad_states(jnp.swapaxes(states, 2, 3))
    tokens = (layout.to_lanes(y, T) for y in (x.q, x.k, x.v))
    return s, kernel.Operands(*compat.vary_alike(*tokens, g, gamma, states, x.cu_seqlens, x.segment_ids))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def attend(s: kernel.Static, x: kernel.Operands):
    """Return (o [B, T, HV * V], final states [N, HV, V, K] or None)."""
    return kernel.launch(s, x)[:2]


@jax.tree_util.register_static
class Wanted(NamedTuple):
    """Whether anybody asks for the gradient of g, and of gamma, which models often hold fixed."""

    g: bool
    gamma: bool


def _forward(s: kernel.Static, x: kernel.Operands):
    # With symbolic zeros the arrays come with what is known of their tangents.
    gates: Any = (x.g, x.gamma)
    wanted = Wanted(*(y is not None and y.perturbed for y in gates))
    x = jax.tree.map(lambda y: y.value, x)
    # The gradient of constant gates is one number for all tokens, which cancel; see `tile`.
    s = s._replace(parts=2 if wanted.gamma else 1)

    def whole(x):
        o, final, kept, *_ = kernel.launch(s, x, keep=True)
        return kept, (o, final)

    def part(x):
        return kernel.launch(s._replace(final=False), x, output=False, keep=True)[2]

    # Under rematerialisation nobody reads the output again, nor in a program of gradients only.
    kept, out = remat.keep(unread.unless_unread(whole, part, x))
    return out, (trim(s, x), kept, wanted)


def _backward(s: kernel.Static, residuals, cotangents):
    x, kept, wanted = residuals
    s, x = s._replace(parts=2 if wanted.gamma else 1), pad(s, x)
    do, dfinal = (None if isinstance(y, SymbolicZero) else y for y in cotangents)
    do = jnp.zeros(x.v.shape, x.v.dtype) if do is None else do
    grads: Any = kernel_bwd.launch(s, x, do, dfinal, kept, wanted.g or wanted.gamma)
    dq, dk, dv, dg, dinitial = grads
    dgamma = None
    if dg is not None and wanted.gamma:
        dgamma = _sum_gates(s, dg)
    dg = None if dg is None or x.g is None else dg.astype(x.g.dtype)
    return (kernel.Operands(dq, dk, dv, dg, dgamma, dinitial),)


attend.defvjp(_forward, _backward, symbolic_zeros=True)


def _sum_gates(s: kernel.Static, dg: jax.Array) -> jax.Array:
    """Return the gradient of the constant gates [HV, 1, 1] from that of all gates, in its three layouts."""
    if s.constant:
        total = jnp.sum(dg, axis=(0, 2, 3))
    elif s.per_channel:
        total = jnp.sum(layout.from_lanes(dg, s.HV, s.K, s.T), axis=(0, 1, 3))
    else:
        # [B, NT, HV, 1, C] by tokens, without those past the end, which share the decay of the last chunk.
        tokens = jnp.moveaxis(dg[:, :, :, 0], 3, 2).reshape(s.B, -1, s.HV)[:, : s.T]
        total = jnp.sum(tokens, axis=(0, 1))
    return total[:, None, None]


def trim(s: kernel.Static, x: kernel.Operands) -> kernel.Operands:
    """Return the operands without the padding of heads: what the forward keeps of them for the backward."""
    K, V = s.widths

    def tokens(y, heads, D, lanes):
        return y if lanes == D else layout.from_lanes(y, heads, D, s.T).reshape(s.B, s.T, -1)

    return x._replace(
        q=tokens(x.q, s.H, K, s.K),
        k=tokens(x.k, s.H, K, s.K),
        v=tokens(x.v, s.HV, V, s.V),
        g=tokens(x.g, s.HV, K, s.K) if s.per_channel else x.g,
        initial_state=None if x.initial_state is None else x.initial_state[:, :, :V, :K],
    )


def pad(s: kernel.Static, x: kernel.Operands) -> kernel.Operands:
    """Return the operands as they were before `trim`."""
    K, V = s.widths

    def tokens(y, heads, D, lanes):
        return y if lanes == D else layout.to_lanes(y.reshape(s.B, s.T, heads, D), s.T)

    return x._replace(
        q=tokens(x.q, s.H, K, s.K),
        k=tokens(x.k, s.H, K, s.K),
        v=tokens(x.v, s.HV, V, s.V),
        g=tokens(x.g, s.HV, K, s.K) if s.per_channel else x.g,
        initial_state=layout.pad_states(x.initial_state),
    )
