"""The way of an operator to the devices of a mesh: it divides itself, and its tokens may be split over some of them."""

from collections.abc import Callable

import jax
from jax import lax
from jax.sharding import AxisType

from chunkwise.shared.operators.arguments import Arguments, Devices, Options, Slots
from chunkwise.shared.operators.checks import check
from chunkwise.shared.operators.context import Form, plain_form, run_context
from chunkwise.shared.operators.partition import Axes, divided, find_division

# From the arguments of one device to the output [B, T, HV, V] and the states, None unless asked for.
Run = Callable[[Arguments, Options, Slots], tuple[jax.Array, jax.Array | None]]

_NO_SLOTS = Slots()


def over_devices(
    run: Run, x: Arguments, options: Options, slots: Slots = _NO_SLOTS, form: Callable[[Options], Form] | None = None
) -> tuple[jax.Array, jax.Array | None]:
    """Run an operator as its arguments lie on the devices of a mesh, if on any, and as `options.devices` says.

    Args:
      run: the operator on one device.
      x, options, slots: its arguments, checked but for the devices.
      form: its form where tokens are split, from options that ask for states; None for the plain form.
    """
    devices, options = options.devices, options._replace(devices=Devices())
    arrays, others = x.arrays()
    arrays |= {name: y for name, y in slots._asdict().items() if y is not None}
    division = find_division(arrays, devices.sharding)
    axes = _context_axes(devices.context_axis)
    if division is not None and division.axes["t"]:
        check(not axes, f"`context_axis` must be None where `sharding` splits tokens; got {devices.context_axis!r}.")
        axes = division.axes["t"]
    pool = slots != _NO_SLOTS
    check(not (axes and pool), f"`state_indices` must come with tokens that are not split; got them over {axes}.")

    def on_device(x: Arguments, slots: Slots) -> tuple[jax.Array, jax.Array | None]:
        if not axes:
            return run(x, options, slots)
        keeping = options._replace(output_final_state=True)
        split = plain_form(lambda y: run(y, keeping, slots)) if form is None else form(keeping)
        return run_context(split, x, axes, bool(options.output_final_state))

    if division is None:
        return _summed(on_device(x, slots), axes)

    def on_arrays(arrays) -> tuple[jax.Array, jax.Array | None]:
        mine = Slots(*(arrays.pop(name, None) for name in Slots._fields))
        return _summed(on_device(Arguments(**others | arrays), mine), division.axes["t"])

    results = divided(on_arrays, arrays, division, bool(options.output_final_state))
    # Axes that a `shard_map` of the caller holds have their sum there, where JAX knows that it is the same on all.
    return _summed(results, () if division.axes["t"] else axes)


def _summed(results: tuple[jax.Array, jax.Array | None], axes: Axes) -> tuple[jax.Array, jax.Array | None]:
    """Return results with the states of `run_context` on all devices."""
    o, states = results
    return o, lax.psum(states, axes) if axes and states is not None else states


def _context_axes(axis) -> Axes:
    """Return the axes that a user named as `context_axis`, checked."""
    axes = () if axis is None else (axis,) if isinstance(axis, str) else axis
    names = isinstance(axes, tuple) and all(isinstance(name, str) for name in axes)
    check(names, f"`context_axis` must be None, the name of a mesh axis or a tuple of names; got {axis!r}.")
    mesh = jax.sharding.get_abstract_mesh()
    held = [n for n, kind in zip(mesh.axis_names, mesh.axis_types, strict=True) if kind == AxisType.Manual]
    check(
        all(name in held for name in axes),
        f"`context_axis` must name axes of the `shard_map` around the call, which has {tuple(held)}; got {axis!r}.",
    )
    return axes
