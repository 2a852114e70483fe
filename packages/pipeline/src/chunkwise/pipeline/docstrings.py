"""An operator's documentation is written once, in its package; the pipeline's function shows it as its own."""

import inspect
import re
from collections.abc import Callable
from typing import TypeVar

F = TypeVar("F", bound=Callable)

IMPLEMENTATION = """\
  implementation: "xla" (plain JAX, runs everywhere), "staged" (a chain of Pallas TPU kernels, one for every stage),
    "fused" (one Pallas TPU kernel for each direction); off TPU the kernels are interpreted. None is the best for the
    backend: off TPU "xla"; on a TPU "fused" if its kernels take these sizes, else "staged". The accuracy below is that
    of "xla" and "fused". "staged" hands one float32 sum of gates from stage to stage: if a chunk holds weak and strong
    gates at once, its error with float32 tensors can reach 5e-5."""

_SECTION = re.compile(r"^(?=(?:Dims|Args|Returns|Raises|Accuracy|Cost|Source):)", re.MULTILINE)
_ENTRY = re.compile(r"^(?=  \S)", re.MULTILINE)


def documented_by(source: Callable, implementation: str = IMPLEMENTATION) -> Callable[[F], F]:
    """Return a decorator that gives a function of the pipeline the docstring of `source`, the package's function.

    What the function's own docstring has replaces the same part of the other: its first line the first line, or the
    whole of what stands before the first section if it goes on after that line; a section; an entry of Args. The entry
    of `implementation` is the one given, and entries of arguments that the function does not take are left out.
    """

    def decorate(function: F) -> F:
        function.__doc__ = _merge(
            inspect.getdoc(source) or "", inspect.getdoc(function) or "", function, implementation
        )
        return function

    return decorate


def _merge(theirs: str, own: str, function: Callable, implementation: str) -> str:
    """Return the docstring of `function`: `theirs`, with the parts that its `own` has."""
    (head, *sections), (own_head, *own_sections) = _SECTION.split(theirs), _SECTION.split(own)
    replaced = {_label(section): section for section in own_sections}
    first_line = head.split("\n", 1)[0]
    more = "\n" in own_head.strip()
    head = own_head if more else head.replace(first_line, own_head.strip(), 1)
    merged = [head.rstrip("\n") + "\n\n"]
    for section in sections:
        label = _label(section)
        part = replaced.get(label, section)
        if label == "Args":
            part = _merge_entries(section, replaced.get(label, ""), function, implementation)
        # What follows a section is where it was.
        merged.append(part.rstrip("\n") + section[len(section.rstrip("\n")) :])
    return "".join(merged).rstrip("\n") + "\n"


def _merge_entries(theirs: str, own: str, function: Callable, implementation: str) -> str:
    """Return the section Args of `theirs` for the arguments of `function`, with the entries that its `own` has."""
    taken = inspect.signature(function).parameters
    replaced = {"implementation": implementation}
    for entry in _ENTRY.split(own)[1:]:
        replaced |= dict.fromkeys(_names(entry), entry)
    entries = [x for x in _ENTRY.split(theirs)[1:] if any(name in taken for name in _names(x))]
    merged = dict.fromkeys(replaced.get(_names(x)[0], x).rstrip("\n") for x in entries)
    return "\n".join(("Args:", *merged))


def _label(section: str) -> str:
    """Return the name of a section: what stands before its colon."""
    return section.split(":", 1)[0]


def _names(entry: str) -> list[str]:
    """Return the arguments that an entry describes."""
    return [name.strip() for name in entry.split(":", 1)[0].split(",")]
