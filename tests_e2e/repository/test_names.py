"""One class name means one thing in all that is shipped, but each package may have its `Config`; files are short."""

import ast
import collections
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDERS = ("benchmarks", "docs", "examples", "packages", "release", "shared", "tests", "tests_e2e")
MOST_LINES = 450


def classes() -> dict[str, list[str]]:
    """Return the places of all classes in the sources, by name."""
    found = collections.defaultdict(list)
    for path in sorted([*ROOT.glob("shared/src/**/*.py"), *ROOT.glob("packages/*/src/**/*.py")]):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                found[node.name].append(f"{path.relative_to(ROOT)}:{node.lineno}")
    return found


def test_one_class_name_means_one_thing():
    repeated = {name: places for name, places in classes().items() if len(places) > 1 and name != "Config"}
    assert not repeated, repeated


def test_files_are_short():
    """Whoever opens a file reads it."""
    files = [path for folder in FOLDERS for path in ROOT.glob(f"{folder}/**/*.py")] + [*ROOT.glob("*.py")]
    long = {str(path.relative_to(ROOT)): n for path in files if (n := len(path.read_text().splitlines())) > MOST_LINES}
    assert not long, long
