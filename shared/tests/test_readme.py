"""The table of rooms in the README of shared names all modules, whose first lines say what they are."""

import ast
from pathlib import Path

import pytest

import chunkwise.shared

README = Path(__file__).parents[1] / "README.md"
ROOMS = "kernels", "kernels/spans", "call", "plain", "implementation", "mesh", "serving", "serving/decode", "testing"


@pytest.mark.parametrize("room", ROOMS)
def test_modules(room):
    folder = Path(chunkwise.shared.__path__[0], room)
    modules = sorted(path for path in folder.glob("*.py") if path.stem != "__init__")
    assert all(ast.get_docstring(ast.parse(path.read_text())) for path in modules)
    name, names = f"chunkwise.shared.{room.replace('/', '.')}", ", ".join(f"`{path.stem}`" for path in modules)
    (row,) = (line for line in README.read_text().splitlines() if line.startswith(f"| `{name}` |"))
    assert row.endswith(f"| {names} |")
