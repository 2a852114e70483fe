"""One class name means one thing in all that is shipped, but for `Config`; files and functions are short."""

import ast
import collections
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDERS = ("benchmarks", "docs", "examples", "packages", "release", "shared", "tests", "tests_e2e")
MOST_LINES, MOST_LINES_OF_A_FUNCTION = 450, 90


def definitions(kind: type) -> dict[str, list[tuple[str, int]]]:
    """Return the places and the lines of all classes, or functions, in the sources, by name."""
    found = collections.defaultdict(list)
    for path in sorted([*ROOT.glob("shared/src/**/*.py"), *ROOT.glob("packages/*/src/**/*.py")]):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, kind):
                place = f"{path.relative_to(ROOT)}:{node.lineno}"
                found[node.name].append((place, node.end_lineno - node.lineno + 1))
    return found


def test_one_class_name_means_one_thing():
    found = definitions(ast.ClassDef)
    repeated = {name: places for name, places in found.items() if len(places) > 1 and name != "Config"}
    assert not repeated, repeated


def test_functions_are_short():
    found = [x for places in definitions(ast.FunctionDef).values() for x in places]
    long = [(place, n) for place, n in found if n > MOST_LINES_OF_A_FUNCTION]
    assert not long, long


def test_files_are_short():
    """Whoever opens a file reads it."""
    files = [path for folder in FOLDERS for path in ROOT.glob(f"{folder}/**/*.py")] + [*ROOT.glob("*.py")]
    long = {str(path.relative_to(ROOT)): n for path in files if (n := len(path.read_text().splitlines())) > MOST_LINES}
    assert not long, long
