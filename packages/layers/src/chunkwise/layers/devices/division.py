"""How layers are divided over the devices of a mesh: by heads, by rows of the batch, and by tokens."""

from collections.abc import Mapping
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from chunkwise.shared.call import checks
from chunkwise.shared.mesh import partition

# The dimensions for which `shardings` takes axes of a mesh.
_DIMENSIONS = ("batch", "tokens", "heads")


def _spec_and_mesh(sharding: checks.Sharding) -> tuple[PartitionSpec, Any]:
    if isinstance(sharding, NamedSharding):
        return sharding.spec, sharding.mesh
    return sharding, jax.sharding.get_abstract_mesh()


def split_heads(sharding: checks.Sharding | None, heads: int) -> checks.Sharding | None:
    """Return the sharding of [B, T, channels] or [B, T, heads, size], given the sharding of v [B, T, HV, V].

    If there are fewer key heads than devices along the axes of value heads, they are split over the first of these
    axes.
    """
    checks.check_sharding(sharding)
    if sharding is None:
        return None
    spec, mesh = _spec_and_mesh(sharding)
    rows, tokens, axes = partition.axes_of_spec(spec, 4)[:3]
    spec = PartitionSpec(rows or None, tokens or None, partition.shared_prefix(mesh, axes, heads) or None)
    return NamedSharding(sharding.mesh, spec) if isinstance(sharding, NamedSharding) else spec


def devices_of_heads(sharding: checks.Sharding | None, o) -> int:
    """Return how many devices share the heads of o [B, T, HV, V], by a sharding or by the type of o."""
    spec, mesh = _spec_and_mesh(jax.typeof(o).sharding if sharding is None else sharding)
    return partition.size_of(mesh, partition.axes_of_spec(spec, 4)[2])


class Letters:
    """Turns letters for the dimensions of arrays into PartitionSpecs.

    The letters are b for rows of the batch, t for tokens, h for key heads, n for value heads, and a dot for a dimension
    that is not split.
    """

    def __init__(self, config, mesh_axes: Mapping[str, Any], mesh):
        known = set(mesh_axes) <= set(_DIMENSIONS)
        checks.check(known, f"`mesh_axes` must have keys of {_DIMENSIONS}; got {tuple(mesh_axes)}.")
        spec = PartitionSpec(*(mesh_axes.get(name) for name in _DIMENSIONS))
        rows, tokens, heads = partition.axes_of_spec(spec, len(_DIMENSIONS))
        split = lambda count: heads if mesh is None else partition.shared_prefix(mesh, heads, count)
        self.axes = {".": (), "b": rows, "t": tokens, "n": split(config.HV), "h": split(config.H)}
        checks.check(self.axes["n"] == heads, f"`HV` must be a multiple of the devices along {heads}; got {config.HV}.")

    def spec(self, letters: str) -> PartitionSpec:
        """Return the PartitionSpec of an array with one letter per dimension."""
        return PartitionSpec(*(self.axes[letter] or None for letter in letters))
