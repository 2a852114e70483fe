"""One class name means one thing in all that is shipped; each package may have its `Config`."""

import ast
import collections
from pathlib import Path

ROOT = Path(__file__).parents[2]


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
