"""The tables of modules in the README of shared are made of the modules' own first lines."""

import ast
from pathlib import Path

import pytest

import chunkwise.shared

README = Path(__file__).parents[1] / "README.md"
ROOMS = "kernels", "kernels/spans", "call", "plain", "implementation", "mesh", "serving", "serving/decode", "testing"


def table(room: str) -> str:
    """Return the rows of the modules of a room: the name, and the first line of the docstring."""
    folder = Path(chunkwise.shared.__path__[0], room)
    modules = sorted(path for path in folder.glob("*.py") if path.stem != "__init__")
    first = {path.stem: ast.get_docstring(ast.parse(path.read_text())).split("\n", 1)[0] for path in modules}
    return "\n".join(f"| `{name}` | {line} |" for name, line in first.items())


@pytest.mark.parametrize("room", ROOMS)
def test_modules(room):
    rows = table(room)
    if rows not in README.read_text():
        pytest.fail(f"The table of `chunkwise.shared.{room}` in {README} must be:\n{rows}")
