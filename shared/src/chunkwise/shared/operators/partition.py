"""Operators that split themselves over the devices of a mesh, as the sharding of v [B, T, HV, V] says.

Rows of the batch, value heads and value channels do not depend on one another, so every device computes its own from
what it holds of the other arguments. The forward needs no communication. In the backward the gradient of an argument
that several devices share is summed over these, and over no others.

The division is a `shard_map` inside of the operator. Its gradient is computed device by device, inside: so it works
under a `shard_map` of the caller too, and the sums stand where this module puts them.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from chunkwise.shared.compat import vary_alike, vary_over, varying_axes
from chunkwise.shared.operators.checks import check

# Axes of a mesh that split a dimension, the first one outermost.
Axes = tuple[str, ...]
# Arguments by name.
Arrays = dict[str, Any]
# From arguments to the output [B, T, HV, V] and the states [N, HV, K, V] or None.
Run = Callable[[Arrays], tuple[jax.Array, jax.Array | None]]

# What the dimensions of an argument are split like, one letter each: b, t, n, d the dimensions of v, which are rows,
# tokens, value heads and value channels; h key heads; s states; "." is not split. A further dimension is not either.
_DIMENSIONS = {
    "q": "bth",
    "k": "bth",
    "v": "btnd",
    "g": "btn",
    "beta": "btn",
    "g_gamma": "n",
    "scale": "",
    "initial_state": "sn.d",
    "cu_seqlens": "",
    "A_log": "n",
    "dt_bias": "n",
    "segment_ids": "bt",
    "state_indices": "s",
    "has_initial_state": "s",
}
_OF_V = {"b": "rows", "t": "tokens", "n": "value heads", "d": "value channels"}


class Division(NamedTuple):
    """How an operator is divided over a mesh.

    Attributes:
      mesh: the mesh, which a `shard_map` of the caller may hold some axes of already.
      axes: of the mesh, by the letters of the dimensions that they split; see `_DIMENSIONS`.
      key_heads: likewise, of the key heads of q and of k, by name: the first of those of the value heads. The devices
        along the others share key heads, and take those that their value heads read.
    """

    mesh: Any
    axes: dict[str, Axes]
    key_heads: dict[str, Axes]

    @property
    def names(self) -> Axes:
        """All axes of the mesh that are not held already."""
        return tuple(name for name in self.mesh.axis_names if _kind(self.mesh, name) != AxisType.Manual)

    @property
    def used(self) -> Axes:
        """The axes that split v."""
        return tuple(name for letter in _OF_V for name in self.axes[letter])

    def of(self, name: str, ndim: int) -> list[Axes]:
        """Return the axes that split the dimensions of an argument."""
        axes = self.axes | {"h": self.key_heads.get(name, ()), ".": ()}
        letters = _DIMENSIONS[name][:ndim].ljust(ndim, ".")
        return [axes[letter] for letter in letters]

    def summed_over(self, name: str, ndim: int) -> Axes:
        """Return the axes over which the gradient of an argument is a sum."""
        own = {axis for axes in self.of(name, ndim) for axis in axes}
        return tuple(axis for axis in self.used if axis not in own)


def size_of(mesh, axes: Axes) -> int:
    """Return how many devices lie along some axes of a mesh."""
    return math.prod(mesh.shape[name] for name in axes)


def _kind(mesh, name: str) -> AxisType:
    return dict(zip(mesh.axis_names, mesh.axis_types, strict=True))[name]


def _axes_of(spec, ndim: int) -> list[Axes]:
    """Return the axes of every dimension of a PartitionSpec."""
    entries = (*spec, *(None,) * (ndim - len(spec)))
    return [() if x is None else x if isinstance(x, tuple) else (x,) for x in entries]


def _spec(axes: list[Axes]) -> PartitionSpec:
    return PartitionSpec(*(x or None for x in axes))


def find_division(arrays: Mapping[str, Any], sharding: Any) -> Division | None:
    """Return how to divide an operator, or None where its arguments lie on no mesh with explicit axes, or on none.

    Args:
      arrays: the arguments by name.
      sharding: of v, a NamedSharding or a PartitionSpec, or None for that of its type.

    Raises:
      ValueError: the sharding of v does not divide it, or that of another argument does not fit to it.
    """
    v = arrays["v"]
    mesh, spec = _sharding_of(v, sharding)
    if mesh is None:
        return None
    split = _axes_of(spec, v.ndim)
    known = all(name in mesh.axis_names for axes in split for name in axes)
    check(known, f"`sharding` must name axes of the mesh {mesh.axis_names}; got {spec}.")
    split = [tuple(name for name in axes if _kind(mesh, name) != AxisType.Manual) for axes in split]
    for (_, what), axes, size in zip(_OF_V.items(), split, v.shape, strict=True):
        devices = size_of(mesh, axes)
        check(
            size % devices == 0,
            f"`v` must have {what} that {devices} devices along {axes} can share; got {size} in {tuple(v.shape)}.",
        )
    axes = dict(zip(_OF_V, split, strict=True))
    axes["s"] = () if arrays.get("cu_seqlens") is not None else axes["b"]
    _check_slots(arrays, mesh, axes["s"])
    first = _shared_prefix(mesh, axes["n"], arrays["q"].shape[2])
    division = Division(mesh, axes, {})
    for name in ("q", "k"):
        # Those of its type, if these are the first of the value heads too.
        own = _own_axes(arrays[name])[2]
        division.key_heads[name] = own if own and own == first[: len(own)] else first
    for name, x in arrays.items():
        _check_fits(name, x, division)
    return division


def _sharding_of(v, sharding: Any) -> tuple[Any, Any]:
    """Return the mesh and the PartitionSpec of v, (None, None) for none."""
    own = jax.typeof(v).sharding
    explicit = [name for name in own.mesh.axis_names if _kind(own.mesh, name) == AxisType.Explicit]
    context = jax.sharding.get_abstract_mesh()
    if sharding is None:
        # Outside of jit only the mesh of the array itself says where its devices are.
        return (own.mesh if isinstance(v, jax.core.Tracer) else v.sharding.mesh, own.spec) if explicit else (None, None)
    check(
        isinstance(sharding, NamedSharding | PartitionSpec),
        f"`sharding` must be None, a NamedSharding or a PartitionSpec; got {type(sharding).__name__}.",
    )
    if isinstance(sharding, NamedSharding):
        # Under a shard_map of the caller the mesh of the context knows which axes that one holds.
        mesh, spec = sharding.mesh if context.empty else context, sharding.spec
    else:
        check(not context.empty, "`sharding` must be a NamedSharding where no mesh is set; got a PartitionSpec.")
        mesh, spec = context, sharding
    open_ = any(entry is PartitionSpec.UNCONSTRAINED for entry in spec)
    check(not open_, f"`sharding` must say for every dimension of `v` how it is split; got {spec}.")
    check(len(spec) <= v.ndim, f"`sharding` must have at most {v.ndim} entries, those of `v`; got {spec}.")
    for have, want in zip(_own_axes(v), _axes_of(spec, v.ndim), strict=True):
        agrees = have == tuple(name for name in want if name in explicit)
        check(agrees, f"`sharding` must be that of `v` along explicit axes, {own.spec}; got {spec}.")
    return mesh, spec


def _own_axes(x) -> list[Axes]:
    """Return the explicit axes that the type of an array says its dimensions are split over."""
    return _axes_of(jax.typeof(x).sharding.spec, x.ndim)


def _shared_prefix(mesh, axes: Axes, H: int) -> Axes:
    """Return the first of the axes over which H key heads can be split."""
    n = len(axes)
    while H % size_of(mesh, axes[:n]):
        n -= 1
    return axes[:n]


def _check_slots(arrays: Mapping[str, Any], mesh, axes: Axes) -> None:
    """Check that the axes that split the rows of a batch can split a pool of states."""
    if arrays.get("state_indices") is None:
        return
    slots, devices = arrays["initial_state"].shape[0], size_of(mesh, axes)
    check(
        slots % devices == 0,
        f"`initial_state` must have slots that {devices} devices along {axes} can share; got {slots} slots.",
    )


def _check_fits(name: str, x, division: Division) -> None:
    """Check that an argument is split over explicit axes as the division wants it, or not at all."""
    wanted = division.of(name, x.ndim)
    for have, want in zip(_own_axes(x), wanted, strict=True):
        check(
            not have or have == want,
            f"`{name}` must be split as {_spec(wanted)}, which `v` asks for, or not be split; got "
            f"{jax.typeof(x).sharding.spec}.",
        )


def _place(x, spec: PartitionSpec, mesh):
    """Return an argument with this sharding along explicit axes; it leaves parts out and needs no communication."""
    own = jax.typeof(x).sharding
    kinds = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    if AxisType.Explicit not in kinds.values():
        return x
    wanted = [tuple(name for name in axes if kinds[name] == AxisType.Explicit) for axes in _axes_of(spec, len(x.shape))]
    return (
        x
        if own.mesh == mesh and wanted == _own_axes(x)
        else jax.sharding.reshard(x, NamedSharding(mesh, _spec(wanted)))
    )


def _take_key_heads(x: jax.Array, rest: Axes, HV: int, group: int) -> jax.Array:
    """Return the key heads that the value heads of a device read.

    Args:
      x: [B, T, H, K], which the devices along `rest` share.
      rest: axes over which the value heads are split and x is not.
      HV: value heads of a device.
      group: value heads for a key head.
    """
    if not rest:
        return x
    each = math.gcd(HV, group)  # so many value heads of a device share a key head
    first = lax.axis_index(rest) * jnp.int32(HV)
    heads = lax.div(first + jnp.arange(0, HV, each, dtype=jnp.int32), jnp.int32(group))
    return jnp.take(x, heads, axis=2)


def _own_slots(arrays: Arrays, axes: Axes) -> tuple[Arrays, jax.Array | None]:
    """Return arguments whose slots are counted in the part of the pool that a device has, and what lies elsewhere.

    That is bool [N], the sequences whose slot is in the part of another device; None where there is no other.
    """
    if arrays.get("state_indices") is None or not axes:
        return arrays, None
    slots, indices = arrays["initial_state"].shape[0], arrays["state_indices"]
    local = indices - lax.axis_index(axes) * jnp.int32(slots)
    own = (indices >= 0) & (local >= 0) & (local < slots)
    return arrays | {"state_indices": jnp.where(own, local, jnp.int32(-1))}, (indices >= 0) & ~own


def _unmarked(x: jax.Array) -> jax.Array:
    """Return x without the mark that it varies over the axes of a `shard_map` of the caller.

    Without the check of varying axes JAX keeps such a mark of an argument, and drops it in every operation: so types
    that should be equal differ.
    """
    return lax.squeeze(lax.expand_dims(x, (0,)), (0,))


def divided(run: Run, arrays: Arrays, division: Division, with_states: bool) -> tuple[jax.Array, jax.Array | None]:
    """Run an operator device by device.

    Args:
      run: takes the arguments of one device; those of `arrays`, by name.
      arrays: the arguments, without those that are None.
      division: of the operator.
      with_states: whether it returns states.
    """
    arrays = dict(zip(arrays, vary_alike(*arrays.values()), strict=True))
    H, HV = arrays["q"].shape[2], arrays["v"].shape[2]
    axes, mesh, names, outer = division.axes, division.mesh, division.names, varying_axes(*arrays.values())
    specs = {name: _spec(division.of(name, x.ndim)) for name, x in arrays.items()}
    arrays = {name: _place(x, specs[name], mesh) for name, x in arrays.items()}
    floats = {name: x for name, x in arrays.items() if jnp.issubdtype(x.dtype, jnp.floating)}
    others = {name: x for name, x in arrays.items() if name not in floats}
    sums = {name: division.summed_over(name, x.ndim) for name, x in floats.items()}
    out_specs = (_spec([axes[x] for x in "btnd"]), _spec([axes["s"], axes["n"], (), axes["d"]]))[: 1 + with_states]
    # The states are the same on all devices along the axes that split tokens: each gets its part of their cotangent.
    share = 1.0 / size_of(mesh, axes["t"])

    def local(floats, others):
        mine, elsewhere = _own_slots(floats | others, axes["s"])
        for name in ("q", "k"):
            rest = axes["n"][len(division.key_heads[name]) :]
            mine[name] = _take_key_heads(mine[name], rest, mine["v"].shape[2], HV // H)
        o, states = run(mine)
        if elsewhere is not None:
            # A result that cannot be had must not look like one.
            o = jnp.where(elsewhere[:, None, None, None], jnp.full((), jnp.nan, o.dtype), o)
        return (o,) if states is None else (o, states)

    def over_devices(f, in_specs, out_specs):
        def body(*args):
            return f(*jax.tree.map(_unmarked, args))

        # What is summed over which devices is written below, so nothing is left for JAX to check or to add.
        return jax.shard_map(
            body, mesh=mesh, axis_names=set(names), in_specs=in_specs, out_specs=out_specs, check_vma=False
        )

    def of(names):
        return {name: specs[name] for name in names}

    def forward(floats, others):
        def body(floats, others):
            results, pull = jax.vjp(lambda y: local(y, others), floats)
            return results, jax.tree.map(lambda y: y[None], pull)

        results, pull = over_devices(body, (of(floats), of(others)), (out_specs, PartitionSpec(names)))(floats, others)
        return vary_over(outer, results), pull

    def backward(pull, cotangents):
        def body(pull, cotangents):
            do, *dstates = cotangents
            (d,) = jax.tree.map(lambda y: y[0], pull)((do, *(y * share for y in dstates)))
            return {name: lax.psum(y, sums[name]) if sums[name] else y for name, y in d.items()}

        d = over_devices(body, (PartitionSpec(names), out_specs), of(floats))(pull, cotangents)
        return vary_over(outer, d), None

    @jax.custom_vjp
    def call(floats, others):
        return vary_over(outer, over_devices(local, (of(floats), of(others)), out_specs)(floats, others))

    call.defvjp(forward, backward)
    o, *states = call(floats, others)
    return o, states[0] if states else None
