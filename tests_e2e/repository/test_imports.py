"""The imports of all modules: none has no reader, none go in a circle, and none go back to a floor above."""

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


# The rooms of shared by floors, the highest first: a module imports from its own room and from the floors below it.
FLOORS = (
    ("operator", "composition", "layer_part", "testing"),
    ("serving", "mesh"),
    ("implementation",),
    ("plain",),
    ("call",),
    ("kernels",),
    ("tuning",),
    ("chips", "compat", "trees", "version"),
)
FLOOR_OF = {room: floor for floor, rooms in enumerate(FLOORS) for room in rooms}

SOURCES = {name: path for folder in packages.FOLDERS.values() for name, path in modules_of(folder / "src").items()}
# What stands above them: folders of the root that are imported as packages, and the examples, which import one another.
ABOVE = {
    f"{folder}.{name}".rstrip("."): path
    for folder in ("benchmarks", "release", "tests")
    for name, path in modules_of(packages.ROOT / folder).items()
} | modules_of(packages.ROOT / "examples")
MODULES = SOURCES | ABOVE
GRAPH = {name: imports(path.read_text(), MODULES) - {name} for name, path in MODULES.items()}
ARROWS = sorted((name, other) for name in SOURCES for other in GRAPH[name])


def reachable(name: str) -> set[str]:
    """Return the modules that a module imports, and that these import, and so on."""
    found, waiting = set(), [name]
    while waiting:
        new = GRAPH[waiting.pop()] - found
        found |= new
        waiting += new
    return found


def test_no_imports_go_in_a_circle():
    """An import inside of a function counts, too."""
    circular = [name for name in GRAPH if name in reachable(name)]
    assert not circular, circular


def test_packages_import_what_they_need():
    """The dependencies in the pyproject.toml of a package are its arrows; nothing installed imports what is not."""
    wrong = []
    for name, other in ARROWS:
        needed = packages.needed(name.split(".")[1])
        if other in ABOVE or other.split(".")[1] not in needed:
            wrong.append(f"{name} imports {other}, and its package needs {needed}")
    assert not wrong, wrong


def test_rooms_of_shared_import_from_floors_below():
    pairs = [(name.split("."), other.split(".")) for name, other in ARROWS if name.startswith("chunkwise.shared.")]
    rooms = {(name[2], other[2]) for name, other in pairs if len(other) > 2}
    assert {room for pair in rooms for room in pair} <= FLOOR_OF.keys()
    back = [pair for pair in rooms if pair[0] != pair[1] and FLOOR_OF[pair[0]] >= FLOOR_OF[pair[1]]]
    assert not back, back


def test_the_page_draws_these_floors():
    drawn = " -> ".join(", ".join(floor) for floor in FLOORS[1:6])
    assert f"| shared   {drawn}; testing |" in (packages.ROOT / "docs/maintain/architecture.md").read_text()


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
    assert any(name in GRAPH[other] for other in SOURCES) or is_shown(name)
