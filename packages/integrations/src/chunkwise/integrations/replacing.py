"""Names in the modules of a host that get values of chunkwise, until they are put back."""

import functools
import inspect
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

_ANY = inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD


class Place(NamedTuple):
    """A name of a host, and the value of chunkwise for it.

    Attributes:
      where: a module of the host, whose functions read the name, or a class, whose method it is.
      name: the name.
      value: the value of chunkwise.
      imported: whether other modules import the name when they need it, so that no function of `where` reads it.
    """

    where: types.ModuleType | type
    name: str
    value: Callable[..., object]
    imported: bool = False

    @property
    def label(self) -> str:
        """The whole name."""
        inside = () if isinstance(self.where, types.ModuleType) else (self.where.__module__,)
        return ".".join((*inside, getattr(self.where, "__qualname__", self.where.__name__), self.name))


class PutBack:
    """Puts the old values back when it is called, and says which names it has replaced when it is printed."""

    def __init__(self, places: tuple[Place, ...], changed: list[tuple[Any, str, Any]]):
        self.places, self.changed = places, changed

    def __call__(self) -> None:
        """Put the old values back."""
        for place in self.changed:
            setattr(*place)

    def __repr__(self) -> str:
        lines = (f"{place.label} -> {place.value.__module__}.{place.value.__qualname__}" for place in self.places)
        return "\n".join(("chunkwise replaces, until this is called:", *lines))


def replace(*places: Place) -> PutBack:
    """Give names of a host their values of chunkwise, and return a function that puts the old values back.

    A name that already has its value of chunkwise is not changed here, nor by the function that is returned. So after
    two installations, the function of the first one undoes both.

    Raises:
      AttributeError: the host has no such name, or nothing would read the value, or a part of the host has read the old
        value already; no name is replaced then.
      TypeError: the host calls the name with other arguments than the value of chunkwise takes; no name is
        replaced then.
    """
    changed = []
    for place in places:
        old = getattr(place.where, place.name)
        if old is not place.value:
            _check_read(place, old)
            _check_arguments(place.label, old, place.value)
            changed.append((place.where, place.name, old))
    for where, name, value, _ in places:
        setattr(where, name, value)
    return PutBack(places, changed)


def _check_read(place: Place, old: object) -> None:
    """Check that somebody reads a name of a host, and nobody a copy: a function knows names of its own module alone.

    A module that only passes names of another module on has no such function, and defines nothing. A method is read
    anywhere in the host, and Python itself reads one such as `__call__`.
    """
    where, name, method = place.where, place.name, isinstance(place.where, type)
    home = where.__module__ if method else where.__name__
    host, here = home.partition(".")[0], getattr(old, "__module__", None) == home
    others = {x: m for x, m in sys.modules.copy().items() if x.partition(".")[0] == host and m not in (where, None)}
    copies = (x for x, m in others.items() if here and not method and getattr(m, name, None) is old and reads(m, name))
    if copied := next(copies, None):
        raise AttributeError(
            f"{place.label} must be replaced before other modules import it; {copied} has, and reads what it got."
        )
    readers = others.values() if isinstance(where, type) else (where,)
    if not (here if place.imported else name.startswith("__") or any(reads(m, name) for m in readers)):
        raise AttributeError(
            f"{place.label} must be read where it is replaced; nothing reads it there in this version of the host, "
            f"where it may have moved."
        )


def reads(module: types.ModuleType, name: str) -> bool:
    """Return whether a function of a module reads a name of the module, or an attribute of this name."""
    names = vars(module)
    functions = (f for x in [*names.values()] for f in _functions(x, set()))
    return any(f.__globals__ is names and name in _names(f.__code__) for f in functions)


def _functions(x: object, seen: set[int]) -> Iterator[types.FunctionType]:
    """Yield the functions in a value: in a class, behind decorators, and in what a decorator's function holds."""
    if id(x) in seen:
        return
    seen.add(id(x))
    inner: list[Any] = []
    if isinstance(x, types.FunctionType):
        yield x
        # An empty cell has no content yet.
        inner += [cell.cell_contents for cell in x.__closure__ or () if cell != types.CellType()]
    elif isinstance(x, type):
        inner += vars(x).values()
    elif isinstance(x, property):
        inner.append(x.fget)
    elif isinstance(x, functools.partial):
        inner.append(x.func)
    if not isinstance(x, type | types.ModuleType):
        inner += [vars(x)[name] for name in ("__wrapped__", "__func__", "method") if name in getattr(x, "__dict__", {})]
        inner += [x.__func__] if isinstance(x, staticmethod | classmethod) else []
    for each in inner:
        if callable(each) or isinstance(each, staticmethod | classmethod | property):
            yield from _functions(each, seen)


def _names(code: types.CodeType) -> set[str]:
    """Return the global names that code reads, also in functions inside of it."""
    inside = (x for x in code.co_consts if isinstance(x, types.CodeType))
    return set(code.co_names).union(*map(_names, inside))


def _check_arguments(label: str, old: Callable, new: Callable) -> None:
    """Check that ours takes the arguments of the host's function, or each method of ours those of the host's method."""
    if isinstance(new, type):
        for name, method in vars(new).items():
            if inspect.isfunction(method) and hasattr(old, name):
                _check_arguments(f"{label}.{name}", getattr(old, name), method)
        return
    theirs, ours = inspect.signature(old), inspect.signature(new)
    if not _takes(ours, theirs, new.__module__.startswith("chunkwise.")):
        raise TypeError(f"{label} takes {theirs} in this version of the host; got {ours} for it from chunkwise.")


def _takes(ours: inspect.Signature, theirs: inspect.Signature, named: bool) -> bool:
    """Return whether a call that fits a signature of a host fits ours; places have the same names too if `named`."""
    of = lambda signature, *kinds: [x for x in signature.parameters.values() if x.kind in kinds]
    kinds = inspect.Parameter
    places, more = (of(x, kinds.POSITIONAL_ONLY, kinds.POSITIONAL_OR_KEYWORD) for x in (theirs, ours))
    any_places = bool(of(ours, kinds.VAR_POSITIONAL))
    # The last ones are given by their names where ours has any names in their place.
    places = places if any_places else places[: len(more)]
    others = [x for x in theirs.parameters.values() if x not in places and x not in of(theirs, *_ANY)]
    if not places and not others:
        # Behind a decorator that takes anything, or without arguments: there is nothing to compare.
        return True
    if named and not any_places and any(x.name != y.name for x, y in zip(places, more, strict=False)):
        return False
    for given in (lambda x: True, lambda x: x.default is x.empty):
        try:
            ours.bind(*filter(given, places), **{x.name: None for x in filter(given, others)})
        except TypeError:
            return False
    return True
