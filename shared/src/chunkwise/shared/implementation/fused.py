"""The implementation "fused" of any operator, made from the kernels of its package.

A package gives `Kernels`: tile sizes, the way of the user's arrays into the layout of its kernels, and its launches.
This module does the rest, which is the same for all packages: the table of spans, states in the layout of the user and
empty sequences, the gradient, the residuals, states in a pool, and the map of the tokens of a device.

The custom_vjp stands around the user's arrays, so the forward saves these for the backward, without padding and in
their types. The backward brings them into the layout of the kernels again, and JAX transposes this step for their
gradients.
"""

import functools
from collections.abc import Callable
from dataclasses import replace
from types import ModuleType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero

from chunkwise.shared import compat, tuning
from chunkwise.shared.call.arguments import Arguments, Options
from chunkwise.shared.implementation import remat
from chunkwise.shared.implementation.implementations import Implementation, with_chunk_size
from chunkwise.shared.kernels import interleaved, launcher, packed
from chunkwise.shared.kernels.spans import chunk_spans, layout, pools
from chunkwise.shared.kernels.spans.operands import FusedStatic, Operands
from chunkwise.shared.plain import affine_scan, state_map

# The table of spans, and the owners of tokens: see `chunk_spans.make_spans`.
Spans = tuple[jax.Array | None, jax.Array | None]
# From operands, the static description of a launch, and the names of outputs to these outputs.
Launch = Callable[[Any, Any, tuple[str, ...]], dict[str, Any]]


class Kernels(NamedTuple):
    """The fused kernels of an operator, and the other things that differ between operators.

    Attributes:
      config_for: from arguments and options with a chunk size to the tile sizes, which are `options.config` where it is
        given; or the sentence that says why the kernels do not take these arguments.
      static_for: from arguments, options with a config, and the names of the arguments whose gradients are requested to
        the static description of a launch, a `FusedStatic`.
      lay_out: from arguments, static, and whether the launch is a backward to the floating-point operands. It is linear
        but for the laws of gates, and JAX transposes it.
      forward: outputs o, ht (the final states), pool_out, and the residuals.
      backward: outputs dq, dk, ..., named after the operands, and dh0 of initial_state; or dh0 alone.
      states: the launch that takes states through the tokens and computes no output o; outputs ht, M, and
        `precomputed`.
      residuals: the outputs of the forward that the backward reads, beside the arguments.
      recomputed: the outputs of the forward that the backward makes again, unless `disable_recompute` keeps them.
      precomputed: the outputs of `states` that `forward` takes, if it runs after `states`; they are residuals, too.
      optional: the operands, named as arguments, whose gradients are computed only where they are requested.
      transposed: whether kernels hold states as [V, K].
      makes_map: whether `states` makes M, the matrices of an `AffineMap`, for these arguments and options with a
        config.
      most_channels: the most channels of the states of one launch of `states`, if M is made by a launch that takes the
        identity beside the states.
      several_chunks: whether a piece may have several chunks: up to `config.chunks`, and with a backward no more than
        `config.chunks_bwd`.
      owner_repeats: from static, how often the owners of the tokens of a chunk are repeated side by side.
      for_states: from arguments and options with a chunk size to those of the map and of the gradient of initial states
        alone. They may say other chunks, unless there are `precomputed` results.
    """

    config_for: Callable[[Arguments, Options], Any]
    static_for: Callable[[Arguments, Options, frozenset[str]], Any]
    lay_out: Callable[[Arguments, Any, bool], Operands]
    forward: Launch
    backward: Launch
    states: Launch
    residuals: tuple[str, ...]
    recomputed: tuple[str, ...] = ()
    precomputed: tuple[str, ...] = ()
    optional: tuple[str, ...] = ()
    transposed: bool = False
    makes_map: Callable[[Arguments, Options], bool] = lambda x, options: False
    most_channels: int = 0
    several_chunks: bool = False
    owner_repeats: Callable[[Any], int] = lambda static: 1
    for_states: Callable[[Arguments, Options], Options] = lambda x, options: options


def plan_by_chunks(several: ModuleType, one: ModuleType, **options: str) -> Launch:
    """Return the plan of `several`, with several chunks a grid step, where it takes the operands, else that of `one`.

    Args:
      several: a module with `supports`, and with `plan`, which returns the arguments of `launcher.launch`.
      one: a module with `plan`.
      **options: further arguments of both plans.
    """
    module = lambda *call: several if several.supports(*call) else one
    return lambda x, static, outputs: module(x, static).plan(x, static, outputs, **options)


def by_chunks(several: ModuleType, one: ModuleType) -> Launch:
    """Return the launch of `plan_by_chunks`."""
    plan = plan_by_chunks(several, one)

    def launch(x: Operands, static: FusedStatic, outputs: tuple[str, ...]) -> dict[str, Any]:
        return launcher.launch(**plan(x, static, outputs))

    return launch


def most_channels(x: Arguments) -> str | None:
    """Return why the kernels of a delta rule, which hold the states of a head whole, do not take x; None if they do."""
    if max(x.q.shape[3], x.v.shape[3]) <= state_map.MOST_CHANNELS:
        return None
    return (
        f'"fused" takes K and V up to {state_map.MOST_CHANNELS}; got {x.q.shape[3]} and {x.v.shape[3]}; use '
        f'implementation="xla".'
    )


def implementation(kernels: Kernels, *options: str, raw_gates: bool = False) -> Implementation:
    """Return the implementation of an operator by its kernels.

    Args:
      kernels: the kernels.
      *options: the names of the options that they read, beside tile sizes.
      raw_gates: whether they take raw gates, see `Implementation`.
    """
    of = lambda function: functools.partial(function, kernels)
    return Implementation(
        "fused", of(run), of(map_states), of(state_gradient), pooled=of(run_pooled),
        options=frozenset({"config", *options}), sizes=of(_sizes), raw_gates=raw_gates, interleaves=True,
        knows_segments=True,
    )  # fmt: skip


def _sizes(kernels: Kernels, x: Arguments, options: Options, states: bool) -> Options | str:
    """Return options with the sizes of chunks and tiles, or why the kernels do not take x, see `Implementation`."""
    # No TPU loads float16. The states are the first array of a pool.
    if x.slots is not None and jax.tree.leaves(x.initial_state)[0].dtype == jnp.float16:
        return '"fused" takes pools of float32 and bfloat16; got float16; use implementation="xla".'
    options = with_chunk_size("fused", x, options)
    options = kernels.for_states(x, options) if states else options
    config = kernels.config_for(x, options)
    if isinstance(config, str):
        return config
    options = options._replace(config=config)
    return _limit_of_table(kernels, x, options) or options


def _limit_of_table(kernels: Kernels, x: Arguments, options: Options) -> str | None:
    """Return why scalar memory has no room for the table of spans; None if it has."""
    if x.cu_seqlens is None and x.segment_ids is None:
        return None
    B, T = x.q.shape[:2]
    if x.cu_seqlens is None or not (x.with_state or options.output_final_state):
        return chunk_spans.limit_of_chunks(B, T, options.chunk_size)
    static = kernels.static_for(x, options, frozenset())
    blocks = x.slots is not None and x.slots.block_state_indices is not None
    return chunk_spans.limit_of_pieces(
        T, static.chunks * static.C, x.num_states, options.block_size if blocks else None
    )


@functools.partial(jax.jit, static_argnums=(0, 2))
def run(kernels: Kernels, x: Arguments, options: Options, precomputed: dict[str, jax.Array] | None = None):
    """Return the output [B, T, HV, V] and the final states [N, HV, K, V], None unless asked for."""
    x = interleaved.unless_fitting(x, options.chunk_size)
    scale = x.scale
    o, states = _attend(kernels, options, *_vary_alike((x._replace(scale=None), precomputed or {})))
    return launcher.scaled(o, scale), states


def _vary_alike(tree):
    """Return a tree of arrays, each varying over the mesh axes of all of them."""
    return compat.vary_over(compat.varying_axes(*jax.tree.leaves(tree)), tree)


def _in_pieces(
    kernels: Kernels, static, block_size: int | None = None, over_pool: bool = False, backward: bool = False
):
    """Return the static description of a launch whose pieces may have several chunks.

    States after blocks of tokens end pieces, too, so a piece has no more tokens than a block. With a `backward`, both
    directions have the same pieces, because residuals are of their chunks.
    """
    if not (kernels.several_chunks and static.varlen):
        return static
    most = min(static.config.chunks, static.config.chunks_bwd) if backward else static.config.chunks
    most = most if block_size is None else min(most, block_size // static.C)
    return static.in_spans_of(tuning.piece_chunks(static.T // static.C, static.N, most, over_pool))


def _spans(kernels: Kernels, x: Arguments, static) -> Spans:
    """Return the spans of a launch over whole sequences."""
    tokens = static.chunks * static.C if static.varlen else static.C
    table, owner = chunk_spans.make_spans(x.q.shape[1], tokens, x.cu_seqlens, static.varlen, x.segment_ids)
    return table, None if owner is None else jnp.tile(owner, (1, 1, kernels.owner_repeats(static)))


def _operands(kernels: Kernels, x: Arguments, static, spans: Spans, backward=False, **more) -> Operands:
    """Return the operands of a launch."""
    table, owner = spans
    return replace(kernels.lay_out(x, static, backward), table=table, owner=owner, **more)


def _outputs(options: Options) -> tuple[str, ...]:
    """Return the names of the outputs of the forward that a user gets."""
    return ("o", "ht") if options.output_final_state else ("o",)


def _user_output(o: interleaved.Tokens, x: Arguments) -> jax.Array:
    """Return an output of a kernel as the user has it: of the tokens of the queries, with the heads and type of v."""
    tokens = interleaved.first(x.q).shape[1]
    return layout.from_lanes(interleaved.first(o), *x.v.shape[2:], tokens).astype(x.v.dtype)


def _user_states(kernels: Kernels, states: jax.Array, x: Arguments, otherwise: jax.Array | None) -> jax.Array:
    """Return states of a kernel as the user has them, with `otherwise` for empty sequences: see `unless_empty`."""
    states, V = jnp.swapaxes(states, 2, 3) if kernels.transposed else states, x.v.shape[3]
    if x.least is not None:
        sums = packed.pad_channels(V)
        states = jnp.concatenate([states[..., :V], states[..., sums : sums + 1]], axis=3)
    channels = x.channels if x.initial_state is None else x.initial_state.shape[3]
    otherwise = None if otherwise is None else otherwise.astype(jnp.float32)
    return layout.unless_empty(states[:, :, : x.q.shape[3], :channels], otherwise, x.cu_seqlens)


def kernel_states(states: jax.Array | None, transposed: bool = False, sums: bool = False) -> jax.Array | None:
    """Return states [N, HV, K, V] of the user as kernels hold them, float32 with both dimensions padded.

    With `sums`, the last channel is apart, in a tile of 8 rows behind the others.
    """
    if states is not None and sums:
        parts: Any = [kernel_states(y, transposed) for y in (states[..., :-1], states[..., -1:])]
        values, last = parts
        return jnp.concatenate([values, last[:, :, :8]], axis=2)
    return layout.pad_states(states if states is None or not transposed else jnp.swapaxes(states, 2, 3))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _attend(kernels: Kernels, options: Options, x: Arguments, precomputed: dict[str, jax.Array]):
    """Run the forward, differentiable; arguments are prepared, and their scale is in the options."""
    static = kernels.static_for(x, options, frozenset())
    static = static if precomputed else _in_pieces(kernels, static)
    operands = _operands(kernels, x, static, _spans(kernels, x, static), **precomputed)
    return _results(kernels, x, kernels.forward(operands, static, _outputs(options)))


def _results(kernels: Kernels, x: Arguments, out: dict[str, jax.Array]) -> tuple[jax.Array, jax.Array | None]:
    """Return the output and the final states of a forward launch as the user has them."""
    states = None if "ht" not in out else _user_states(kernels, out["ht"], x, x.initial_state)
    return _user_output(out["o"], x), states


def _forward(kernels: Kernels, options: Options, x: Arguments, precomputed: dict[str, jax.Array]):
    # With symbolic zeros, every array comes with a flag that says whether its gradient is requested.
    requested = frozenset(name for name, y in x._asdict().items() if getattr(y, "perturbed", False))
    x, precomputed = jax.tree.map(lambda y: y.value, (x, precomputed))
    static = kernels.static_for(x, options, requested)
    static = static if precomputed else _in_pieces(kernels, static, backward=True)
    spans = _spans(kernels, x, static)
    residuals = kernels.residuals + kernels.recomputed * options.disable_recompute
    names = tuple(name for name in residuals if name not in precomputed)

    def launch(outputs: tuple[str, ...], x, spans, precomputed):
        out = kernels.forward(_operands(kernels, x, static, spans, **precomputed), static, (*outputs, *names))
        return {name: out[name] for name in names}, {name: out[name] for name in outputs}

    whole = functools.partial(launch, _outputs(options))
    if names:
        # Nobody reads the output under rematerialisation, nor in a program of gradients only.
        residuals, out = remat.recompute_if_unused(whole, lambda *args: launch((), *args)[0], x, spans, precomputed)
    else:
        residuals, out = whole(x, spans, precomputed)
    residuals, out = remat.save_for_backward((residuals, out))
    # The requested names are the keys of a dict without arrays, because residuals can hold no strings.
    saved = x, spans, residuals, precomputed, dict.fromkeys(requested)
    return _results(kernels, x, out), saved


def _backward(kernels: Kernels, options: Options, saved, cotangents):
    x, (table, owner), residuals, precomputed, requested = saved
    static, residuals = kernels.static_for(x, options, frozenset(requested)), residuals | precomputed
    static = static if precomputed else _in_pieces(kernels, static, backward=True)
    do, dstates = (None if isinstance(y, SymbolicZero) else y for y in cotangents)
    do = jnp.zeros((*interleaved.first(x.q).shape[:2], *x.v.shape[2:]), x.v.dtype) if do is None else do
    floats = {name: y for name, y in x.arrays().items() if jnp.issubdtype(y.dtype, jnp.floating)}
    operands, transpose = jax.vjp(lambda floats: kernels.lay_out(x._replace(**floats), static, True), floats)
    if not residuals.keys() >= {*kernels.recomputed}:
        y = _operands(kernels, x, static, (table, owner), **residuals)
        residuals |= kernels.forward(y, static, kernels.recomputed)
    present = [name for name, y in vars(operands).items() if y is not None]
    computed = [name for name in present if name not in kernels.optional or name in requested]
    d = kernels.backward(
        replace(
            operands, table=table, owner=owner, **residuals,
            do=layout.to_lanes(interleaved.like(x.q, do.astype(operands.v.dtype)), static.T),
            dht=kernel_states(dstates, kernels.transposed, x.least is not None),
        ),
        static, tuple(map(_gradient_of, computed)),
    )  # fmt: skip
    zeros = {name: jax.tree.map(jnp.zeros_like, getattr(operands, name)) for name in present if name not in computed}
    gradients = {name: d[_gradient_of(name)].astype(getattr(operands, name).dtype) for name in computed}
    (dfloats,) = transpose(replace(operands, **gradients, **zeros))
    nothing = dict.fromkeys(Arguments._fields)
    return Arguments(**nothing | dfloats), None


def _gradient_of(operand: str) -> str:
    """Return how a launch calls the gradient of an operand."""
    return "dh0" if operand == "initial_state" else f"d{operand}"


_attend.defvjp(_forward, _backward, symbolic_zeros=True)


@functools.partial(jax.jit, static_argnums=(0, 2))
def run_pooled(kernels: Kernels, x: Arguments, options: Options, routes: pools.Routes) -> tuple[jax.Array, jax.Array]:
    """Run the forward from and to the states of a pool, `x.initial_state`, in place."""
    x = interleaved.unless_fitting(x, options.chunk_size)
    scale, pool, x = x.scale, pools.as_they_lie(x.initial_state), x._replace(scale=None, initial_state=None)
    static = _in_pieces(kernels, kernels.static_for(x, options, frozenset()), options.block_size, over_pool=True)
    table, count = chunk_spans.pool_spans(x.q.shape[1], static.chunks * static.C, routes, options.block_size)
    static = replace(static, listed=table.shape[1])
    operands = _vary_alike(_operands(kernels, x, static, (table, None), pool=pool, count=count))
    out = kernels.forward(operands, static, ("o", "pool_out"))
    return launcher.scaled(_user_output(out["o"], x), scale), pools.as_users_see(out["pool_out"])


def map_states(kernels: Kernels, x: Arguments, options: Options, with_M: bool) -> state_map.Found:
    """Return the map that the tokens apply to a state, and results that a later forward need not compute again."""
    makes_map = kernels.makes_map(x, options)
    if x.beta is None or makes_map:
        N, M, precomputed = _launch_states(kernels, x, options, with_M and makes_map)
        return affine_scan.AffineMap(M, N), precomputed

    def states_after(x: Arguments) -> tuple[jax.Array, Any]:
        N, _, precomputed = _launch_states(kernels, x, options, False)
        return N, precomputed

    return state_map.augment_with_identity(states_after, x, kernels.most_channels, with_M)


@functools.partial(jax.jit, static_argnums=(0, 2, 3))
def _launch_states(kernels: Kernels, x: Arguments, options: Options, with_map: bool) -> tuple[Any, Any, Any]:
    """Return the states after the tokens, M or None, and `precomputed`; states may have more channels than v."""
    options, x = options._replace(output_final_state=True), x._replace(scale=None)
    # This launch does not know whether the gradient of constant gates is requested, and takes the precision for it.
    static = kernels.static_for(x, options, frozenset(Arguments._fields))
    operands = _vary_alike(_operands(kernels, x, static, _spans(kernels, x, static)))
    out = kernels.states(operands, static, ("ht", *kernels.precomputed, *(("M",) if with_map else ())))
    M, K = out.get("M"), x.q.shape[3]
    if M is not None:
        # Nobody asks for the map of an empty sequence.
        M = (jnp.swapaxes(M, 2, 3) if kernels.transposed else M)[:, :, :K, :K]
    precomputed = remat.save_for_backward({name: out[name] for name in kernels.precomputed})
    return _user_states(kernels, out["ht"], x, x.initial_state), M, precomputed


@functools.partial(jax.jit, static_argnums=(0, 2))
def state_gradient(
    kernels: Kernels,
    x: Arguments,
    options: Options,
    precomputed: dict[str, jax.Array],
    do: jax.Array,
    dstates: jax.Array,
) -> jax.Array:  # fmt: skip
    """Return the gradient of the initial states alone, from the cotangents of `run`."""
    options = options._replace(output_final_state=True)
    do, x = launcher.scaled(do, x.scale), x._replace(scale=None)
    static = kernels.static_for(x, options, frozenset(Arguments._fields))
    operands = _operands(kernels, x, static, _spans(kernels, x, static), True, **precomputed or {})
    do = layout.to_lanes(do.astype(operands.v.dtype), static.T)
    operands = _vary_alike(replace(operands, do=do, dht=kernel_states(dstates, kernels.transposed)))
    return _user_states(kernels, kernels.backward(operands, static, ("dh0",))["dh0"], x, dstates)
