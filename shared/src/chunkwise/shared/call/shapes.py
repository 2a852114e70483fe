"""Checks of several arrays, whose dimensions have names."""

from collections.abc import Mapping
from typing import Any

from chunkwise.shared.call import checks


def check_arrays(arrays: Mapping[str, Any], sizes: Mapping[str, int] | None = None, **dims: str) -> dict[str, int]:
    """Check arrays by name, whose dimensions have one size wherever `dims` names them; return all sizes."""
    known = dict(sizes or {})
    for name, labels in dims.items():
        wanted = tuple(known.get(label) for label in labels.split())
        known |= zip(labels.split(), checks.check_array(name, arrays[name], labels, wanted), strict=True)
    return known


def check_parts(state: Any, kind: type, sizes: Mapping[str, int], **dims: str) -> None:
    """Check an `initial_state` that is a tuple of arrays, of a NamedTuple `kind` with these dimensions; None passes."""
    names = ", ".join(dims)
    known = state is None or (isinstance(state, tuple) and len(state) == len(dims))
    checks.check(
        known, f"`initial_state` must be None or a tuple {kind.__name__} ({names}); got {checks.shown(state)}."
    )
    for part, (name, labels) in zip(state or (), dims.items(), strict=False):
        wanted = tuple(sizes[label] for label in labels.split())
        checks.check_array(f"initial_state.{name}", part, labels, wanted)
