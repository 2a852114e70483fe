"""Names of a host that stand for something of chunkwise, until they are put back."""

from collections.abc import Callable
from typing import Any

# A module of a host, the name of an attribute, and its value of chunkwise.
Place = tuple[Any, str, Any]


def replace(*places: Place) -> Callable[[], None]:
    """Give names of a host their values of chunkwise, and return a function that puts back what they stood for.

    A name that has its value of chunkwise already is left alone, now and by the function that is returned: of two
    installations, the first one's end ends both.

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
