"""How layers are divided over the devices of a mesh: by heads, by rows of the batch, and by tokens."""

import math
from collections.abc import Mapping
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from chunkwise.shared.operators import Sharding, check

Axes = tuple[str, ...]
# What `shardings` takes names of axes for.
_DIMENSIONS = ("batch", "tokens", "heads")


def _axes(entry) -> Axes:
    """Return the axes that an entry of a PartitionSpec names."""
    return () if entry is None else entry if isinstance(entry, tuple) else (entry,)


def _entry(sharding: Sharding, dimension: int) -> Axes:
    spec = sharding.spec if isinstance(sharding, NamedSharding) else sharding
    return _axes(spec[dimension]) if len(spec) > dimension else ()


def _mesh(sharding: Sharding | None):
    return sharding.mesh if isinstance(sharding, NamedSharding) else jax.sharding.get_abstract_mesh()


def _count(mesh, axes: Axes) -> int:
    return math.prod(mesh.shape[name] for name in axes)


def _shared_by(axes: Axes, heads: int, mesh) -> Axes:
    """Return the first of the axes over which so many heads can be split; all of them without a mesh."""
    n = len(axes)
    while mesh is not None and heads % _count(mesh, axes[:n]):
        n -= 1
    return axes[:n]


def split_heads(sharding: Sharding | None, heads: int) -> Sharding | None:
    """Return the sharding of [B, T, channels] or [B, T, heads, size] where `sharding` is that of v [B, T, HV, V].

    Key heads may be fewer than the devices along the axes of value heads, and are split over the first of these then.
    """
    if sharding is None:
        return None
    rows, tokens, axes = (_entry(sharding, i) for i in range(3))
    spec = PartitionSpec(rows or None, tokens or None, _shared_by(axes, heads, _mesh(sharding)) or None)
    return NamedSharding(sharding.mesh, spec) if isinstance(sharding, NamedSharding) else spec


def devices_of_heads(sharding: Sharding | None, o) -> int:
    """Return how many devices share the heads of o [B, T, HV, V], by a sharding or by the type of o."""
    known = jax.typeof(o).sharding if sharding is None else sharding
    return _count(_mesh(known), _entry(known, 2))


class Letters:
    """Turns letters for the dimensions of arrays into PartitionSpecs.

    The letters are b for rows of the batch, t for tokens, h for key heads, n for value heads, and a dot for a dimension
    that is not split.
    """

    def __init__(self, config, mesh_axes: Mapping[str, Any], mesh):
        known = set(mesh_axes) <= set(_DIMENSIONS)
        check(known, f"`mesh_axes` must have keys of {_DIMENSIONS}; got {tuple(mesh_axes)}.")
        rows, tokens, heads = (_axes(mesh_axes.get(name)) for name in _DIMENSIONS)
        self.axes = {
            ".": (), "b": rows, "t": tokens, "n": _shared_by(heads, config.HV, mesh),
            "h": _shared_by(heads, config.H, mesh),
        }  # fmt: skip
        check(self.axes["n"] == heads, f"`HV` must be a multiple of the devices along {heads}; got {config.HV}.")

    def spec(self, letters: str) -> PartitionSpec:
        """Return the PartitionSpec of an array with one letter per dimension."""
        return PartitionSpec(*(self.axes[letter] or None for letter in letters))
