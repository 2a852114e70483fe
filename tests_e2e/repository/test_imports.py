"""The imports of the modules that are installed: who has no reader."""

import ast
import re
from pathlib import Path

import pytest

from release import packages

FOLDERS = (".", "docs", "docs/*", "shared", "packages/*")
PAGES = [path.read_text() for folder in FOLDERS for path in packages.ROOT.glob(f"{folder}/[!C]*.md")]


def modules_of(folder: Path) -> dict[str, Path]:
    """Return the files of the modules in a folder that is on the path, by name."""
    found = {}
    for path in sorted(folder.rglob("*.py")):
        parts = path.relative_to(folder).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imports(text: str, known) -> set[str]:
    """Return the modules among `known` that a module's text imports, anywhere in it."""
    found = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            found |= {name if name in known else str(node.module) for name in names}
    return found & set(known)


SOURCES = {name: path for folder in packages.FOLDERS.values() for name, path in modules_of(folder / "src").items()}
GRAPH = {name: imports(path.read_text(), SOURCES) - {name} for name, path in SOURCES.items()}


def is_shown(name: str) -> bool:
    """Return whether a page names a module, the README of its package names its file, or a command calls it."""
    parent, _, last = name.rpartition(".")
    folder = packages.FOLDERS[name.split(".")[1]]
    return (
        any(re.search(rf"\b{name}\b|from {parent} import {last}\b", text) for text in PAGES)
        or f"`{last}.py`" in (folder / "README.md").read_text()
        or f'"{name}:' in (folder / "pyproject.toml").read_text()
    )


@pytest.mark.parametrize("name", sorted(name for name, path in SOURCES.items() if path.stem != "__init__"))
def test_every_module_has_a_reader(name):
    """The wheels hold no helpers of tests: a source imports every module, or a page shows it to users."""
    assert any(name in found for found in GRAPH.values()) or is_shown(name)
