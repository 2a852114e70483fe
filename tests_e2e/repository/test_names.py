"""One class name means one thing in all that is shipped, but for `Config`; files, functions and the whole are short."""

import ast
import collections
import tokenize
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDERS = ("benchmarks", "docs", "examples", "packages", "release", "shared", "tests", "tests_e2e")
MOST_LINES, MOST_LINES_OF_A_FUNCTION = 450, 90
# Lines of code of the source, and lines of tests for a line of the source.
MOST_CODE, MOST_TESTS = 19_268, 0.80
# What is no code, beside docstrings and imports.
SPACE = {getattr(tokenize, name) for name in ("COMMENT", "NL", "NEWLINE", "INDENT", "DEDENT", "ENCODING", "ENDMARKER")}


def definitions(kind: type) -> dict[str, list[tuple[str, int]]]:
    """Return the places and the lines of all classes, or functions, in the sources, by name."""
    found = collections.defaultdict(list)
    for path in sorted(sources()):
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


def sources() -> list[Path]:
    return [*ROOT.glob("shared/src/**/*.py"), *ROOT.glob("packages/*/src/**/*.py")]


def code_lines(path: Path) -> int:
    """Return how many lines have code that is no docstring and no import."""
    lines, others = set(), set()
    with path.open("rb") as file:
        for token in tokenize.tokenize(file.readline):
            if token.type not in SPACE:
                lines |= {*range(token.start[0], token.end[0] + 1)}
    for node in ast.walk(ast.parse(path.read_text())):
        is_text = (
            isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        )
        if is_text or isinstance(node, ast.Import | ast.ImportFrom):
            others |= {*range(node.lineno, node.end_lineno + 1)}
    return len(lines - others)


def test_the_whole_is_short():
    tests = [*ROOT.glob("packages/*/tests/**/*.py"), *(ROOT / "shared/tests").glob("**/*.py"), ROOT / "conftest.py"]
    tests += [path for folder in ("tests", "tests_e2e") for path in ROOT.glob(f"{folder}/**/*.py")]
    lines = lambda paths: sum(len(path.read_text().splitlines()) for path in paths)
    assert sum(map(code_lines, sources())) <= MOST_CODE
    assert lines(tests) <= MOST_TESTS * lines(sources())
