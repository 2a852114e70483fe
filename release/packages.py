"""The packages of the tree: their folders, the packages that each needs, and the packages that a change affects.

A package is a folder with a pyproject.toml: shared, and every such folder of packages/.
"""

import re
import subprocess
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path

ROOT = Path(__file__).parents[1]
MANIFESTS = [ROOT / "shared/pyproject.toml", *sorted(ROOT.glob("packages/*/pyproject.toml"))]
FOLDERS = {path.parent.name: path.parent for path in MANIFESTS}
PROJECTS = {path.parent.name: tomllib.loads(path.read_text())["project"] for path in MANIFESTS}

# A reference to a sibling in a pyproject.toml: the name, the extras and the folder in hatchling's form.
SIBLING = re.compile(r"(chunkwise-[a-z0-9-]+)(\[[a-z,]+\])? @ \{root:[^\"]*")

# Folders of which the tests of packages read no file; nor do they read pages in the root.
NOT_READ = ("docs/", "examples/", "notebooks/", "benchmarks/", "tests_e2e/", ".github/", ".ci/")


def needed(name: str) -> list[str]:
    """Return the packages that a package needs, the farthest first and the package itself last."""
    siblings = [match[1] for line in PROJECTS[name]["dependencies"] if (match := SIBLING.match(line))]
    direct = [other for other in FOLDERS if PROJECTS[other]["name"] in siblings]
    return list(dict.fromkeys([*(x for other in direct for x in needed(other)), name]))


def needs_of_tests() -> dict[str, list[str]]:
    """Return for each folder of tests the folders that its tests need, with itself; all are paths from the root."""
    paths = {name: folder.relative_to(ROOT).as_posix() for name, folder in FOLDERS.items()}
    needs = {path: [paths[other] for other in needed(name)] for name, path in paths.items()}
    return needs | {"tests_e2e/simulated": [*needs["packages/pipeline"], "tests_e2e/simulated"]}


def changed_files() -> list[str]:
    """Return the files that differ from the commit where this branch left main, and files that are not tracked."""
    branches = git("for-each-ref", "--format=%(refname:short)", "refs/heads/main", "refs/remotes/origin/main")
    if not branches:
        raise SystemExit("`--changed` compares with the branch main or origin/main; git knows neither.")
    (base,) = git("merge-base", "HEAD", branches[0])
    return [*git("diff", "--name-only", base), *git("ls-files", "--others", "--exclude-standard")]


def git(*arguments: str) -> list[str]:
    """Return the lines that a command of git prints about this repository."""
    command = ("git", "-C", str(ROOT), *arguments)
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()


def reached(files: Iterable[str], needs: Mapping[str, Iterable[str]]) -> list[str]:
    """Return the folders of `needs` whose tests a change of files affects; all if a file belongs to the whole tree.

    Args:
      files: paths from the root.
      needs: for each folder the folders that its tests need, with itself.
    """
    found = set()
    for file in files:
        folder = next((folder for folder in needs if file.startswith(f"{folder}/")), None)
        if folder is None and not file.startswith(NOT_READ) and not re.fullmatch(r"[^/]*\.(md|cff)", file):
            return list(needs)
        found.add(folder)
    return [folder for folder, others in needs.items() if found.intersection(others)]
