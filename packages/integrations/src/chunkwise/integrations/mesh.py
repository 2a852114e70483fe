"""How a module finds the mesh that `jax.set_mesh` has set, so that its caller need not pass it."""

from typing import Any

import jax
from jax.sharding import AxisType

from chunkwise import layers
from chunkwise.shared.call import checks

# Pairs of a dimension to divide and axes of a mesh, the items of `mesh_axes` of `chunkwise.layers.shardings`.
Axes = str | tuple[str, ...] | None
MeshAxes = tuple[tuple[str, Axes], ...] | None


def shardings_on(config: layers.LayerConfig, mesh_axes: MeshAxes) -> layers.Shardings | None:
    """Return how a layer is divided over the mesh that is set; None without a mesh or without `mesh_axes`."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh_axes is None:
        return None
    axes = dict(mesh_axes)
    known = all(axis in mesh.axis_names for name in axes for axis in _names(axes[name]))
    checks.check(known, f"`mesh_axes` must name axes of the mesh {mesh.axis_names}; got {axes}.")
    return layers.shardings(config, axes, mesh)


def division(config: layers.LayerConfig, mesh_axes: MeshAxes) -> dict[str, Any]:
    """Return the arguments that tell a layer of `chunkwise.layers` about the mesh that is set.

    Only automatic axes, and axes of tokens inside a `shard_map`, need an argument: the types of arrays say how explicit
    axes divide them, and inside a `shard_map` arrays have their local sizes.
    """
    on = shardings_on(config, mesh_axes)
    if on is None or mesh_axes is None:
        return {}
    mesh = jax.sharding.get_abstract_mesh()
    kinds = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    manual = tuple(axis for axis in _names(dict(mesh_axes).get("tokens")) if kinds[axis] == AxisType.Manual)
    automatic = AxisType.Auto in kinds.values()
    return {"sharding": on.values if automatic else None, "context_axis": manual or None}


def _names(axes: Axes) -> tuple[str, ...]:
    """Return axes, given as one name, a tuple of names or None, as a tuple."""
    return (axes,) if isinstance(axes, str) else tuple(axes or ())
