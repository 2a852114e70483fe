"""Names in the modules of a host that get values of chunkwise, until they are put back."""

from collections.abc import Callable
from typing import Any

# A module of a host, the name of an attribute, and the value of chunkwise for it.
Place = tuple[Any, str, Any]


def replace(*places: Place) -> Callable[[], None]:
    """Give names of a host their values of chunkwise, and return a function that puts the old values back.

    A name that already has its value of chunkwise is not changed here, nor by the function that is returned. So after
    two installations, the function of the first one undoes both.

    Raises:
      AttributeError: the host has no such name, in which case none is replaced.
    """
    before = [(where, name, getattr(where, name)) for where, name, _ in places]
    changed = [old for old, (_, _, new) in zip(before, places, strict=True) if old[2] is not new]
    for place in places:
        setattr(*place)

    def put_back() -> None:
        for place in changed:
            setattr(*place)

    return put_back
