"""What pages and docstrings promise is in promises.csv, each with the tests that fail when it is broken."""

import ast
import csv
import functools
import importlib
import inspect
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ROWS = [*csv.DictReader((ROOT / "tests_e2e/pages/promises.csv").read_text().splitlines())]
PAGES = [
    path.relative_to(ROOT).as_posix()
    for pattern in ("README.md", "docs/**/*.md", "packages/*/README.md", "shared/README.md")
    for path in sorted(ROOT.glob(pattern))
]
# Pages that promise nothing to a user, and why.
WITHOUT = {
    "packages/integrations/README.md": "docs/integrations.md has the promises",
    "shared/README.md": "nothing of it is public",
}


def flat(text: str) -> str:
    return " ".join(text.split())


@functools.cache
def text_of(where: str) -> str:
    """Return the text of a page, or the docstring of a public name."""
    if where.endswith(".md"):
        return flat((ROOT / where).read_text())
    module, _, name = where.rpartition(".")
    return flat(inspect.getdoc(getattr(importlib.import_module(module), name)) or "")


@functools.cache
def defined_in(path: str) -> set[str]:
    """Return the tests of a file, and of its classes; a suite has tests that packages inherit."""
    assert Path(path).name.startswith("test_") or Path(path).name.endswith("_suite.py"), path
    found = set()
    for node in ast.parse((ROOT / path).read_text()).body:
        functions = node.body if isinstance(node, ast.ClassDef) else [node]
        prefix = f"{node.name}::" if isinstance(node, ast.ClassDef) else ""
        found |= {prefix + each.name for each in functions if isinstance(each, ast.FunctionDef)}
    return {name for name in found if name.rpartition("::")[2].startswith("test_")}


@pytest.mark.parametrize("where", dict.fromkeys(row["where"] for row in ROWS))
def test_a_promise_stands_where_the_list_says(where):
    promised = [row["sentence"] for row in ROWS if row["where"] == where]
    assert [sentence for sentence in promised if flat(sentence) not in text_of(where)] == []


def test_a_promise_has_tests():
    for row in ROWS:
        tests = row["tests"].split()
        assert tests, row["sentence"]
        for path, _, name in (test.partition("::") for test in tests):
            assert name in defined_in(path), f"{row['sentence']!r} names {path}::{name}"


def test_a_mutant_has_a_test():
    """docs/data/mutants.csv names mistakes, and for each a test that fails, or all quick ones: functions, or cases."""
    for row in csv.DictReader((ROOT / "docs/data/mutants.csv").read_text().splitlines()):
        first, every = row["the first test that fails"], row["all quick tests that fail"].split()
        assert first in (every or [first]), row
        for test in every or [first]:
            path, _, name = test.partition("[")[0].partition("::")
            assert name in defined_in(path), row


def test_every_page_has_a_promise():
    """A new page adds to the list, or says here why it has none."""
    have = {row["where"] for row in ROWS}
    assert have.isdisjoint(WITHOUT)
    assert [page for page in PAGES if page not in have | WITHOUT.keys()] == []
    assert WITHOUT.keys() <= set(PAGES)


def test_the_list_has_no_row_twice():
    rows = [(row["where"], flat(row["sentence"])) for row in ROWS]
    assert len(rows) == len(set(rows))
