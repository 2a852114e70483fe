"""Operators that divide themselves over the devices of a mesh, by the sharding of one argument.

This argument is the *leading* one, v [B, T, HV, V] or x. Its dimensions that can be split, such as the rows of a batch,
value heads or channels, do not depend on one another, so every device computes its part of them from the parts of the
other arguments that it holds. The forward needs no communication, unless tokens are split. In the backward, if several
devices share an argument, its gradient is a sum over these devices and over no others.

The division is a `shard_map` inside of the operator. The gradient is computed inside of it, device by device. So the
operator also works under a `shard_map` of the caller, and this module alone says where sums over devices are.
"""

import functools
import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from chunkwise.shared import compat, trees
from chunkwise.shared.call import checks
from chunkwise.shared.kernels import interleaved

# Axes of a mesh that split a dimension, the first one outermost.
Axes = tuple[str, ...]
# Arguments by name.
Arrays = dict[str, Any]
# From arguments to the output, and the states or None.
Run = Callable[[Arrays], tuple[jax.Array, jax.Array | None]]


class Layout(NamedTuple):
    """Which dimensions of the arguments and results of an operator are split alike: each dimension has a letter.

    Dimensions with the same letter are split alike. "b" stands for rows of the batch, "t" for tokens, "s" for states,
    which are split like rows, or in a packed batch not at all. A dimension with "." or without a letter is not split.

    Attributes:
      leading: the name of the argument whose sharding says how letters are split.
      meanings: what the devices share for the letters of the leading argument.
      arguments: the letters of every argument, by name.
      results: the letters of the output, and of the states if there are any.
      prefixes: from the letter of a dimension, such as key heads, to the letter of a larger one, such as value heads.
        The smaller dimension is split over the first axes of the larger one, as many as divide it evenly. Only one
        argument may have such a letter.
    """

    leading: str
    meanings: Mapping[str, str]
    arguments: Mapping[str, str]
    results: tuple[str, ...]
    prefixes: Mapping[str, str] = MappingProxyType({})

    def letters(self, name: str, ndim: int) -> str:
        """Return the letters of an argument that has `ndim` dimensions."""
        return self.arguments[name][:ndim].ljust(ndim, ".")


class Division(NamedTuple):
    """How an operator is divided over a mesh.

    Attributes:
      layout: the layout of the operator.
      mesh: the mesh; a `shard_map` of the caller may have made some of its axes manual.
      axes: the axes of the mesh that split a dimension, by its letter.
    """

    layout: Layout
    mesh: Mesh | AbstractMesh
    axes: dict[str, Axes]

    @property
    def names(self) -> Axes:
        """All axes of the mesh that are not manual already."""
        return tuple(name for name in self.mesh.axis_names if compat.axis_type(self.mesh, name) != AxisType.Manual)

    @property
    def used(self) -> Axes:
        """The axes that split the leading argument."""
        return tuple(name for letter in self.layout.meanings for name in self.axes[letter])

    @property
    def tokens(self) -> Axes:
        """The axes that split tokens, without axes of a single device."""
        return self._several(self.axes.get("t", ()))

    def of(self, name: str, ndim: int) -> list[Axes]:
        """Return the axes that split the dimensions of an argument."""
        return [self.axes[letter] for letter in self.layout.letters(name, ndim)]

    def spec(self, letters: str) -> PartitionSpec:
        """Return how dimensions with these letters are split."""
        return _spec([self.axes[letter] for letter in letters])

    def summed_over(self, name: str, ndim: int) -> Axes:
        """Return the axes over which the gradient of an argument is a sum."""
        split = {axis for axes in self.of(name, ndim) for axis in axes}
        return self._several(tuple(axis for axis in self.used if axis not in split))

    def _several(self, axes: Axes) -> Axes:
        return tuple(axis for axis in axes if self.mesh.shape[axis] > 1)


def size_of(mesh, axes: Axes) -> int:
    """Return how many devices lie along some axes of a mesh."""
    return math.prod(mesh.shape[name] for name in axes)


def axes_of_spec(spec, ndim: int) -> list[Axes]:
    """Return the axes of every dimension of a PartitionSpec."""
    entries = (*spec, *(None,) * (ndim - len(spec)))
    return [() if x is None else x if isinstance(x, tuple) else (x,) for x in entries]


def _spec(axes: list[Axes]) -> PartitionSpec:
    return PartitionSpec(*(x or None for x in axes))


def find_division(arrays: Mapping[str, Any], layout: Layout, sharding: checks.Sharding | None) -> Division | None:
    """Return how to divide an operator; None without a `sharding` and without a mesh with explicit axes.

    Args:
      arrays: the arguments that are not None, by name.
      layout: the layout of the operator.
      sharding: how the leading argument is split, a NamedSharding or a PartitionSpec; None if its type says it.

    Raises:
      ValueError: the sharding does not divide the leading argument, or the sharding of another argument does not fit
        it.
    """
    name = layout.leading
    x, meanings = arrays[name], layout.meanings
    mesh, spec = _sharding_of(name, x, sharding)
    if mesh is None:
        return None
    split = axes_of_spec(spec, x.ndim)
    known = all(axis in mesh.axis_names for axes in split for axis in axes)
    checks.check(known, f"`sharding` must name axes of the mesh {mesh.axis_names}; got {spec}.")
    split = [tuple(axis for axis in axes if compat.axis_type(mesh, axis) != AxisType.Manual) for axes in split]
    axes: dict[str, Axes] = {".": ()}
    for dim, (letter, names, size) in enumerate(zip(layout.letters(name, x.ndim), split, x.shape, strict=True)):
        devices = size_of(mesh, names)
        checks.check(
            letter in meanings or not names, f"`{name}` must not be split along its dimension {dim}; got {spec}."
        )
        checks.check(
            size % devices == 0,
            f"`{name}` must have {meanings.get(letter)} that {devices} devices along {names} can share; got {size} in "
            f"{tuple(x.shape)}.",
        )
        axes[letter] = names
    axes["s"] = () if "cu_seqlens" in arrays else axes.get("b", ())
    division = Division(layout, mesh, axes)
    for name, y in arrays.items():
        for letter, names, size in zip(layout.letters(name, y.ndim), _axes_of_type(y), y.shape, strict=True):
            if letter in layout.prefixes:
                first = shared_prefix(mesh, axes[layout.prefixes[letter]], size)
                # An array that is split already stays as it is, if its axes are the first axes of the larger dimension.
                axes[letter] = names if names and names == first[: len(names)] else first
        _check_fits(name, y, division)
    return division


def _sharding_of(name: str, x, sharding: checks.Sharding | None) -> tuple[Any, Any]:
    """Return the mesh and the PartitionSpec of the leading argument, (None, None) if there is no mesh."""
    x = interleaved.first(x)
    placed = jax.typeof(x).sharding
    explicit = [name for name in placed.mesh.axis_names if compat.axis_type(placed.mesh, name) == AxisType.Explicit]
    context = jax.sharding.get_abstract_mesh()
    if sharding is None:
        # Outside of jit, only the mesh of the array itself has devices.
        return (
            (placed.mesh if isinstance(x, jax.core.Tracer) else x.sharding.mesh, placed.spec)
            if explicit
            else (None, None)
        )
    checks.check_sharding(sharding)
    if isinstance(sharding, NamedSharding):
        # Under a shard_map of the caller, the mesh of the context says which axes are manual already.
        mesh, spec = sharding.mesh if context.empty else context, sharding.spec
    else:
        checks.check(not context.empty, "`sharding` must be a NamedSharding where no mesh is set; got a PartitionSpec.")
        mesh, spec = context, sharding
    open_ = any(entry is PartitionSpec.UNCONSTRAINED for entry in spec)
    checks.check(not open_, f"`sharding` must say for every dimension of `{name}` how it is split; got {spec}.")
    checks.check(len(spec) <= x.ndim, f"`sharding` must have at most {x.ndim} entries, those of `{name}`; got {spec}.")
    for have, want in zip(_axes_of_type(x), axes_of_spec(spec, x.ndim), strict=True):
        agrees = have == tuple(axis for axis in want if axis in explicit)
        checks.check(agrees, f"`sharding` must be that of `{name}` along explicit axes, {placed.spec}; got {spec}.")
    return mesh, spec


def _axes_of_type(x) -> list[Axes]:
    """Return the explicit axes that the type of an array says its dimensions are split over."""
    return axes_of_spec(jax.typeof(interleaved.first(x)).sharding.spec, x.ndim)


def shared_prefix(mesh, axes: Axes, size: int) -> Axes:
    """Return as many of the first axes as can split a dimension of this size evenly."""
    n = len(axes)
    while size % size_of(mesh, axes[:n]):
        n -= 1
    return axes[:n]


def _check_fits(name: str, x, division: Division) -> None:
    """Check that an argument is split over explicit axes as the division says, or not at all."""
    wanted, leading = division.of(name, x.ndim), division.layout.leading
    for have, want in zip(_axes_of_type(x), wanted, strict=True):
        checks.check(
            not have or have == want,
            f"`{name}` must be split as {_spec(wanted)}, which `{leading}` asks for, or not be split; got "
            f"{jax.typeof(interleaved.first(x)).sharding.spec}.",
        )


def place(x: interleaved.Tokens, spec: PartitionSpec, mesh: Mesh | AbstractMesh) -> Any:
    """Return an argument with this sharding along explicit axes; devices drop parts, and nothing is communicated."""
    if isinstance(x, interleaved.Interleaved):
        return x.map(functools.partial(place, spec=spec, mesh=mesh))
    explicit = [name for name in mesh.axis_names if compat.axis_type(mesh, name) == AxisType.Explicit]
    if not explicit:
        return x
    wanted = [tuple(name for name in axes if name in explicit) for axes in axes_of_spec(spec, len(x.shape))]
    placed = jax.typeof(x).sharding.mesh == mesh.abstract_mesh and wanted == _axes_of_type(x)
    return x if placed else jax.sharding.reshard(x, NamedSharding(mesh, _spec(wanted)))


def whole_rows(x: jax.Array) -> jax.Array:
    """Return an array [B, T, ...] whose tokens no explicit axis of a mesh splits, because a scan goes along them."""
    kind = jax.typeof(x).sharding
    return place(jnp.asarray(x), PartitionSpec(*kind.spec[:1], None, *kind.spec[2:]), kind.mesh)


def _unmarked(x: jax.Array) -> jax.Array:
    """Return x without the mark that it varies over the axes of a `shard_map` of the caller.

    With check_vma=False, JAX keeps such a mark on arguments and drops it in every operation, so that types that should
    be equal would differ.
    """
    return lax.squeeze(lax.expand_dims(x, (0,)), (0,))


def token_axes(division: Division | None, context_axis: str | tuple[str, ...] | None) -> Axes:
    """Return the axes that split the tokens of an operator, from its division or from the user's `context_axis`.

    Raises:
      ValueError: both do, or `context_axis` does not name axes of the `shard_map` around the call.
    """
    axes = checks.check_context_axis(context_axis)
    if division is None or not division.tokens:
        return axes
    checks.check(not axes, f"`context_axis` must be None where `sharding` splits tokens; got {context_axis!r}.")
    return division.tokens


def over_mesh(
    run: Run, arrays: Arrays, division: Division | None, tokens: Axes, with_states: bool = False
) -> tuple[jax.Array, jax.Array | None]:
    """Run an operator on every device of a mesh with the part of the arguments that lies there.

    Args:
      run: takes the arguments of one device, by name. Where tokens are split, it returns zeros for states that another
        device has, and the states are added up here.
      arrays: the arguments that are not None.
      division: the division of the operator; None if only a `shard_map` of the caller divides it, by tokens.
      tokens: the axes that split tokens, see `token_axes`.
      with_states: whether it returns states.
    """
    if division is None:
        return _summed(run(arrays), tokens)
    inside = division.tokens
    arrays = dict(zip(arrays, compat.vary_alike(*arrays.values()), strict=True))
    mesh, names, outer = division.mesh, division.names, compat.varying_axes(*arrays.values())
    specs = {name: _spec(division.of(name, x.ndim)) for name, x in arrays.items()}
    arrays = {name: place(x, specs[name], mesh) for name, x in arrays.items()}
    floats = {name: x for name, x in arrays.items() if jnp.issubdtype(x.dtype, jnp.floating)}
    others = {name: x for name, x in arrays.items() if name not in floats}
    sums = {name: division.summed_over(name, x.ndim) for name, x in floats.items()}
    letters = division.layout.results[: 1 + with_states]
    out_specs = tuple(map(division.spec, letters))
    # The states are a sum over the axes that split tokens, and the same on all of their devices; each device gets an
    # equal share of the cotangent.
    share = 1.0 / size_of(mesh, inside)

    def local(floats, others):
        o, states = run(jax.tree.map(_unmarked, floats | others))
        return (o,) if states is None else (o, lax.psum(states, inside) if inside else states)

    def over_devices(f, in_specs, out_specs):
        # The sums over devices are written out below, so JAX shall neither check nor add any.
        return jax.shard_map(
            f, mesh=mesh, axis_names=set(names), in_specs=in_specs, out_specs=out_specs, check_vma=False
        )

    def of(names):
        return {name: specs[name] for name in names}

    def forward(floats, others):
        def body(floats, others):
            floats, others = jax.tree.map(_unmarked, (floats, others))
            results, pull = jax.vjp(lambda y: local(y, others), floats)
            return results, trees.at(pull, None)

        results, pull = over_devices(body, (of(floats), of(others)), (out_specs, PartitionSpec(names)))(floats, others)
        return compat.vary_over(outer, results), pull

    def backward(pull, cotangents):
        def body(pull, cotangents):
            pull, (do, *dstates) = jax.tree.map(_unmarked, (pull, cotangents))
            (d,) = trees.at(pull, 0)((do, *(y * share for y in dstates)))
            return {name: summed(x, sums[name]) for name, x in d.items()}

        def summed(x, axes):
            # Sums are in float32, whatever the type is.
            return jax.tree.map(lambda y: lax.psum(y.astype(jnp.float32), axes).astype(y.dtype) if axes else y, x)

        d = over_devices(body, (PartitionSpec(names), out_specs), of(floats))(pull, cotangents)
        return compat.vary_over(outer, d), None

    @jax.custom_vjp
    def call(floats, others):
        return compat.vary_over(outer, over_devices(local, (of(floats), of(others)), out_specs)(floats, others))

    call.defvjp(forward, backward)
    o, *states = call(floats, others)
    # Sums over axes that are manual in the caller's `shard_map` are here, where JAX sees that the sum is the same on
    # all devices.
    return _summed((o, states[0] if states else None), () if inside else tokens)


def can_place(division: Division, arguments: object, letters: object) -> bool:
    """Return whether each device can take its part of some arguments, as `on_devices` hands them out.

    That is so if dimensions can be shared evenly, and are split along explicit axes as the division says or not at all.
    """

    def fits(x, wanted: list[Axes]) -> bool:
        each = zip(_axes_of_type(x), wanted, x.shape, strict=True)
        return all((not have or have == want) and size % size_of(division.mesh, want) == 0 for have, want, size in each)

    def of_part(part_letters, part):
        axes = [division.axes[letter] for letter in part_letters]
        return all(fits(x, [*axes, *[()] * (x.ndim - len(axes))]) for x in jax.tree.leaves(part))

    return all(jax.tree.leaves(jax.tree.map(of_part, letters, arguments)))


def on_devices(run: Callable[..., Any], division: Division, arguments: object, letters: object, results: object) -> Any:
    """Run a function without gradient on every device of a mesh, with the part of the arguments that lies there.

    Args:
      run: takes the arguments of one device.
      division: says how letters are split.
      arguments: a tuple of trees of arrays.
      letters: a tree of strings, with one for each array or for a whole part of `arguments`: the letters of the first
        dimensions; the others are not split.
      results: the same for the results of `run`.
    """
    leaves, structure = jax.tree.flatten(arguments)
    arguments = structure.unflatten(compat.vary_alike(*map(jnp.asarray, leaves)))
    in_specs, out_specs = (jax.tree.map(division.spec, tree) for tree in (letters, results))

    def place_part(part_letters: str, part: object) -> object:
        return jax.tree.map(functools.partial(place, spec=division.spec(part_letters), mesh=division.mesh), part)

    placed = jax.tree.map(place_part, letters, arguments)
    call = jax.shard_map(
        lambda *parts: run(*jax.tree.map(_unmarked, parts)), mesh=division.mesh, axis_names=set(division.names),
        in_specs=in_specs, out_specs=out_specs, check_vma=False,
    )  # fmt: skip
    return compat.vary_over(compat.varying_axes(*jax.tree.leaves(arguments)), call(*placed))


def _summed(results: tuple[jax.Array, jax.Array | None], axes: Axes) -> tuple[jax.Array, jax.Array | None]:
    """Return results with the sum of the states over these axes."""
    o, states = results
    return o, lax.psum(states, axes) if axes and states is not None else states
