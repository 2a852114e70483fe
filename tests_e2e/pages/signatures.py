"""The tables of the page on moving here: what differs by position between a function of another library and ours."""

import ast
import inspect
import re
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from chunkwise import causal_conv1d, norm_gated, pipeline

PAGE = (Path(__file__).parents[2] / "docs/moving-here.md").read_text()
# | `theirs` | `ours` | order there |
ROW = re.compile(r"^\| `(\w+)` \| `(\w+)` \| (\w+(?:, \w+)*) \|$", re.MULTILINE)
# | `module`: `theirs`, `theirs` | `ours`, `ours` |
PAIR = re.compile(r"^\| `[\w.]+`: `(\w+)`, `(\w+)` \| `(\w+)`, `(\w+)` \|$", re.MULTILINE)


class Difference(NamedTuple):
    """A row of such a table."""

    theirs: str
    ours: str
    there: list[str]


def section(library: str) -> str:
    """Return what the page says of moving from a library."""
    return PAGE.split(f"\n## From {library}\n")[1].split("\n## ")[0]


def differences(library: str) -> list[Difference]:
    """Return the functions of which the page says that their order differs."""
    return [Difference(theirs, ours, there.split(", ")) for theirs, ours, there in ROW.findall(section(library))]


def pairs(library: str) -> list[tuple[str, str]]:
    """Return the names of theirs and ours of which the page says that one takes the place of the other."""
    rows = PAIR.findall(section(library))
    return [pair for *theirs, a, b in rows for pair in zip(theirs, (a, b), strict=True)]


def _parameters(name: str) -> Mapping[str, inspect.Parameter]:
    module = next(module for module in (pipeline, causal_conv1d, norm_gated) if name in module.__all__)
    return inspect.signature(getattr(module, name)).parameters


def names_here(name: str) -> set[str]:
    """Return all arguments of our function."""
    return {*_parameters(name)}


def order_here(name: str) -> list[str]:
    """Return the arguments of our function that a call may give by position."""
    parameters = _parameters(name).values()
    return [parameter.name for parameter in parameters if parameter.kind is parameter.POSITIONAL_OR_KEYWORD]


def order_there(name: str, paths: list[Path]) -> list[str]:
    """Return the arguments by position of a function in one of these files, which need not be importable."""
    found = set()
    for text in (path.read_text() for path in paths):
        if f"\ndef {name}(" in text:
            functions = (node for node in ast.parse(text).body if isinstance(node, ast.FunctionDef))
            (function,) = (node for node in functions if node.name == name)
            found.add(tuple(argument.arg for argument in function.args.args))
    (order,) = found
    return [*order]


def check(rows: list[Difference], paths: list[Path]) -> None:
    """Check that the function of each row has the order that the page says, and that ours has another one."""
    assert rows
    for row in rows:
        here, there = order_here(row.ours), order_there(row.theirs, paths)
        assert row.there == there[: len(row.there)], row.theirs
        assert any(a != b for a, b in zip(there, here, strict=False)), row.theirs
