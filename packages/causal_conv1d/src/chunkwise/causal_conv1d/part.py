"""The records of the convolution: over whole sequences, and from and to a pool of states."""

import functools
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from chunkwise.causal_conv1d import config as tiles
from chunkwise.causal_conv1d import context, edges, kernel, slot_kernel, vjp, xla
from chunkwise.shared import compat
from chunkwise.shared.call import arguments, checks, configs, faults
from chunkwise.shared.kernels import chunking, derivatives
from chunkwise.shared.kernels.spans import row_sequences
from chunkwise.shared.layer_part import LayerPart, PartOptions, Results
from chunkwise.shared.mesh import devices, partition
from chunkwise.shared.mesh.partition import Arrays
from chunkwise.shared.serving import slot_rows, step_table

_LAYOUT = partition.Layout(
    leading="x",
    meanings={"b": "rows", "t": "tokens", "d": "channels"},
    arguments={
        "x": "btd",
        "weight": "d",
        "bias": "d",
        "initial_state": "s.d",
        "cu_seqlens": "",
        "segment_ids": "bt",
    },
    results=("btd", "s.d"),
)
_POOL_LAYOUT = partition.Layout(
    leading="x",
    meanings=_LAYOUT.meanings,
    arguments={
        "x": "btd",
        "states": "s.d",
        "weight": "d",
        "bias": "d",
        "cu_seqlens": "",
        **devices.SLOT_DIMENSIONS,
    },
    results=("btd", "s.d"),
)


def _check_weights(weight, bias, D: int) -> int:
    """Check weight and bias for D channels and return the width."""
    W = checks.check_array("weight", weight, "D W", (D, None))[1]
    widths = tiles.WIDTHS
    checks.check(W in widths, f"`weight` must have a width of {widths[0]} to {widths[-1]}; got {W}.")
    if bias is not None:
        checks.check_array("bias", bias, "D", (D,))
    return W


def _check_initial_state(initial_state, x, shape: tuple[int, int, int]) -> None:
    """Check the initial states; by position flash-linear-attention has a residual there, of the shape of x."""
    found = getattr(initial_state, "shape", None)
    checks.check(
        found != x.shape or found == shape,
        f"`initial_state` must have shape [N, W-1, D] = {shape}; got {found}, the shape of `x`, which `residual` has, "
        "the fourth argument of flash-linear-attention: add a residual to the result.",
    )
    checks.check_array("initial_state", initial_state, "N W-1 D", shape)


def _choose(options: PartOptions, on_tpu: str) -> PartOptions:
    """Return options with the name of an implementation, which is `on_tpu` on a TPU if the user gave none."""
    name = checks.choose_implementation(options.implementation, ("pallas", "xla"), on_tpu=on_tpu)
    return replace(options, implementation=name)


def _check_sequences(arrays: Arrays, options: PartOptions) -> tuple[Arrays, PartOptions]:
    """Check the arguments of `causal_conv1d`."""
    x, state, boundaries, ids = (arrays[name] for name in ("x", "initial_state", "cu_seqlens", "segment_ids"))
    B, T, D = checks.check_array("x", x, "B T D")
    W = _check_weights(arrays["weight"], arrays["bias"], D)
    devices_of_tokens = lax.axis_size(partition.token_axes(None, options.context_axis))
    boundaries = checks.check_cu_seqlens(boundaries, B, T * devices_of_tokens)
    checks.check_segment_ids(ids, B, T, boundaries)
    N = B if boundaries is None else boundaries.shape[0] - 1
    if state is not None:
        _check_initial_state(state, x, (N, W - 1, D))
    checks.check_activation(options.activation)
    checks.check_flags(output_final_state=options.output_final_state)
    config = options.config
    options = replace(options, implementation=configs.choose_stage(options.implementation, config, tiles))
    fits = config is None or config.tokens % 16 == config.channels % 128 == 0
    checks.check(fits, f"`config` must have multiples of 16 tokens and of 128 channels; got {config}.")
    final = (x if state is None else state).dtype if options.output_final_state else None
    return arrays | dict(cu_seqlens=boundaries, segment_ids=checks.as_int32(ids)), replace(options, final=final)


def _check_halo(arrays: Arrays, places: devices.Places) -> None:
    """Check that a device has as many tokens as the next device needs of it."""
    (division, tokens), T, S = places, arrays["x"].shape[1], arrays["weight"].shape[1] - 1
    held = T if division is None else T // partition.size_of(division.mesh, division.tokens)
    checks.check(
        not tokens or held >= S,
        f"`x` must have at least W - 1 = {S} tokens on each of the devices along {tokens}; got {held}.",
    )


def _in_order(arrays: Arrays) -> list[Any]:
    """Return the arguments of `causal_conv1d` in their order, None for those that are missing."""
    return [arrays.get(name) for name in _LAYOUT.arguments]


@functools.partial(jax.jit, static_argnums=1)
def _convolve(arrays: Arrays, options: PartOptions) -> Results:
    """Run `causal_conv1d` on one device."""
    x, weight, bias, states, cu_seqlens, segment_ids = _in_order(arrays)
    (B, T, D), W, final = x.shape, weight.shape[1], options.final
    # Here once; otherwise JAX does it at every use, and sums each part of a gradient over the devices separately.
    x, weight, bias, states = compat.vary_alike(x, weight, bias, states)
    s = row_sequences.find(B, T, cu_seqlens, segment_ids)
    rows = weight.astype(jnp.float32).T  # [W, D]
    shift = jnp.zeros((1, D), jnp.float32) if bias is None else bias.astype(jnp.float32)[None]
    before = None if states is None else edges.state_rows(rows, states)  # [N, W - 1, D]
    if options.implementation == "xla":
        y = xla.convolve(x, rows, shift, before, s, options.activation)
    else:
        static = kernel.ConvStatic(T, W, options.activation, options.config or tiles.default_for(T, D))
        operands = derivatives.of_kernel("causal_conv1d", _operands(x, rows, shift, before, s, static))
        y = vjp.convolve(operands, static)
    return y, None if final is None else edges.final_states(x, states, W, s, final)


def _operands(x, weight, bias, before, s: row_sequences.RowSequences, static: kernel.ConvStatic) -> kernel.ConvOperands:
    blocks, sequences, reach = kernel.tables(s, x.shape[0], before is not None, static)
    rows = None if before is None else before.reshape(-1, 1, x.shape[2])
    return kernel.ConvOperands(*compat.vary_alike(blocks, sequences, x, reach, weight, bias, rows))


def _convolve_part(arrays: Arrays, options: PartOptions, places: devices.Places) -> Results:
    """Run `causal_conv1d` on every device of a mesh."""
    if lax.axis_size(places[1]) == 1:
        return _convolve(arrays, options)
    x, weight, bias, states, boundaries, ids = _in_order(arrays)
    *part, ends = context.find_part(x, states, boundaries, ids, weight.shape[1], options.final is not None, places[1])
    y, states = _convolve(dict(zip(_LAYOUT.arguments, (x, weight, bias, *part), strict=True)), options)
    return y, None if states is None else jnp.where(ends[:, None, None], states, jnp.zeros((), options.final))


def _check_tokens(arrays: Arrays, options: PartOptions) -> tuple[Any, arguments.Slots, int]:
    """Check what any update has, and return its boundaries, its slots and N."""
    given, most = arrays["cu_seqlens"], arrays["num_sequences"]
    B, T, D = checks.check_array("x", arrays["x"], "B T D")
    W = _check_weights(arrays["weight"], arrays["bias"], D)
    checks.check_cu_seqlens(given, B, T) if most is None else checks.check_packed(given, B)
    boundaries = checks.as_int32(given)
    slots = arguments.Slots(*(checks.as_int32(arrays[name]) for name in arguments.Slots._fields))
    N = B if boundaries is None else boundaries.shape[0] - 1
    checks.check_array(
        "states", arrays["states"], "slots W-1 D", (N if slots.state_indices is None else None, W - 1, D)
    )
    checks.check_activation(options.activation)
    return boundaries, slots, N


def _check_update(arrays: Arrays, options: PartOptions) -> tuple[Arrays, PartOptions]:
    """Check the arguments of an update of the same kind for all sequences."""
    boundaries, slots, N = _check_tokens(arrays, options)
    checks.check_slots(slots.state_indices, slots.has_initial_state, N)
    checks.check_slot_values(slots.state_indices, "states", arrays["states"].shape[0])
    slots = arguments.Slots(slots.state_indices, slots.has_initial_state)
    chosen = replace(_choose(options, "xla"), output_final_state=True)
    return arrays | dict(cu_seqlens=boundaries) | slots._asdict(), chosen


def _check_step(arrays: Arrays, options: PartOptions) -> tuple[Arrays, PartOptions]:
    """Check the arguments of a serving step."""
    boundaries, slots, N = _check_tokens(arrays, options)
    states, T = arrays["states"], arrays["x"].shape[1]
    checks.check(boundaries is not None, "`cu_seqlens` must be given in a serving step; got None.")
    checks.check_step_types(slots, N, options.block_size)
    find = functools.partial(step_table.find_faults, boundaries, slots, states.shape[0], T, options.block_size)
    faults.check_known_values((boundaries, *slots), find)
    chosen = replace(_choose(options, "pallas" if slots.state_indices.size < T else "xla"), output_final_state=True)
    if options.implementation == "pallas":
        slot_kernel.check_type(states)
    return arrays | dict(cu_seqlens=boundaries) | step_table.with_counts(slots)._asdict(), chosen


def _check_pool(arrays: Arrays, places: devices.Places) -> None:
    """Check that devices can divide the pool and that no tokens are split."""
    division, tokens = places
    devices.check_pool(arrays, division, "states")
    checks.check(not tokens, f"`x` must have tokens that are not split; got them over {tokens}.")


def _update_part(arrays: Arrays, options: PartOptions, places: devices.Places) -> Results:
    """Run an update of the same kind for all sequences on every device of a mesh."""
    division = places[0]
    assert division is not None
    arrays, elsewhere = devices.local_slots(arrays, division.axes["s"], "states")
    y, states = _update(arrays, options)
    return devices.without_elsewhere(y, elsewhere), states


@functools.partial(jax.jit, static_argnums=1)
def _update(arrays: Arrays, options: PartOptions) -> Results:
    """Run an update of the same kind for all sequences on one device."""
    x, pool, cu_seqlens, slots = arrays["x"], arrays["states"], arrays.get("cu_seqlens"), _slots(arrays)
    if cu_seqlens is not None:
        cu_seqlens = chunking.rising(cu_seqlens, x.shape[1])
    before = slot_rows.read_states(pool, slots)
    y, _ = _convolve(_after(arrays, before, cu_seqlens), options)
    s = row_sequences.find(*x.shape[:2], cu_seqlens, None)
    states = edges.final_states(x, before, arrays["weight"].shape[1], s, pool.dtype)
    return y, slot_rows.write_states(pool, slots, states)


def _slots(arrays: Arrays) -> arguments.Slots:
    return arguments.Slots(**{name: arrays[name] for name in arguments.Slots._fields if name in arrays})


def _after(arrays: Arrays, before, boundaries) -> Arrays:
    """Return the arguments of a convolution of tokens after some states."""
    return {name: arrays.get(name) for name in ("x", "weight", "bias")} | dict(
        initial_state=before, cu_seqlens=boundaries
    )


@functools.partial(jax.jit, static_argnums=1)
def _step(arrays: Arrays, options: PartOptions) -> Results:
    """Run a serving step: a decode writes a state to a slot after every token, and a prefill after its last token."""
    x, pool, slots, W = arrays["x"], arrays["states"], _slots(arrays), arrays["weight"].shape[1]
    step = step_table.find_step(arrays["cu_seqlens"], slots, pool.shape[0], x.shape[1])
    decodes, prefills = step.decodes, step.prefills
    rows = slot_kernel if options.implementation == "pallas" and slot_kernel.supports(pool) else slot_rows
    # A sequence is either a decode or a prefill; in the table of the other kind it has no tokens and reads no slot.
    before = rows.read(pool, jnp.maximum(decodes.source, prefills.source))
    y, _ = _convolve(_after(arrays, before, step.boundaries), options)
    s = row_sequences.find(*x.shape[:2], step.boundaries, None)

    def write(pool, slot, end):
        return rows.write(pool, slot, edges.final_states(x, before, W, s._replace(end=end), pool.dtype))

    after_tokens = lambda count: s.start + jnp.int32(count)
    end = jnp.where(prefills.start < prefills.end, s.end, after_tokens(1))
    pool = write(pool, jnp.maximum(decodes.target[:, 0], prefills.target[:, 0]), end)
    for t in range(1, decodes.target.shape[1]):
        pool = write(pool, decodes.target[:, t], after_tokens(t + 1))
    if slots.block_state_indices is not None:
        assert options.block_size is not None
        _, slot = step_table.full_blocks(prefills, options.block_size)
        for m in range(slot.shape[1]):
            pool = write(pool, slot[:, m], after_tokens((m + 1) * options.block_size))
    return y, pool


SEQUENCES = LayerPart(_LAYOUT, _check_sequences, _convolve, _check_halo, _convolve_part)
UPDATE = LayerPart(_POOL_LAYOUT, _check_update, _update, _check_pool, _update_part)
STEP = LayerPart(_POOL_LAYOUT, _check_step, _step, _check_pool)


def update_for(named: Arrays) -> LayerPart:
    """Return STEP if there is an argument that only serving steps have, else UPDATE."""
    slots, block_size = _slots(named), named["block_size"]
    none = isinstance(slots.num_decodes, int) and slots.num_decodes == 0
    more = (block_size, *slots._replace(state_indices=arguments.ABSENT, has_initial_state=None, num_decodes=None))
    columns = getattr(slots.state_indices, "ndim", 1) == 2
    return STEP if columns or not none or any(y is not None for y in more) else UPDATE
