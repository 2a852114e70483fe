"""Pytrees of arrays, taken apart and put together."""

from typing import Any

import jax


def at(tree: object, index: Any) -> Any:
    """Return every array of a tree at an index, which may be a slice, or None for a new first dimension of size 1."""
    return jax.tree.map(lambda x: x[index], tree)
