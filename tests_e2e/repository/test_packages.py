"""What a package needs, and which tests `nox -s tests -- --changed` runs."""

import os
import subprocess
import sys

import pytest

from release import packages
from tests import alone_suite

NEEDS = packages.needs_of_tests()
ABOVE = ["packages/command", "packages/integrations", "packages/layers"]
OF_KDA = [f"packages/{name}" for name in ("dplr", "kda", "pipeline", "recipes", "two_keys")]
KERNELS = [name for name in packages.FOLDERS if name != "shared" and "pipeline" not in packages.needed(name)]
# The sessions `solo` do the same where nothing else is installed.
THOROUGH = dict(test_every_argument_works_alone=True)


def test_needed():
    assert packages.needed("shared") == ["shared"]
    assert packages.needed("two_keys") == ["shared", "kda", "two_keys"]
    assert set(packages.FOLDERS) - set(packages.needed("integrations")) == {"command"}


def test_modules_of_others_with_the_names_of_our_folders(tmp_path):
    """Whoever forgets `-e` or ./ installs the package `shared` of somebody else; tests are collected beside it."""
    for name in (path.name for path in packages.ROOT.iterdir() if path.is_dir()):
        module = tmp_path / name / "__init__.py"
        module.parent.mkdir()
        module.write_text("raise ImportError(f'{__file__} is not ours')")
    some = ("packages/two_keys", "shared/tests/test_version.py")
    some += tuple(f"tests_e2e/repository/test_{name}.py" for name in ("estimates", "packages"))
    command = (sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", *some)
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    done = subprocess.run(command, cwd=packages.ROOT, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ([], []),
        (["docs/kda.md", "README.md", "tests_e2e/mesh/meshes.py", "examples/train.py"], []),
        (["packages/integrations/tests/test_engines.py", "docs/kda.md"], ["packages/integrations"]),
        (["packages/pipeline/README.md"], [*ABOVE, "packages/pipeline", "tests_e2e/simulated"]),
        # In the order of their names.
        (["packages/kda/src/chunkwise/kda/tile.py"], sorted([*ABOVE, *OF_KDA, "tests_e2e/simulated"])),
        (["tests_e2e/simulated/test_tier.py"], ["tests_e2e/simulated"]),
        (["packages/kda/README.md", "conftest.py"], list(NEEDS)),
        (["shared/src/chunkwise/shared/compat.py"], list(NEEDS)),
        (["release/lock.txt"], list(NEEDS)),
    ],
)
def test_reached(files, expected):
    assert packages.reached(files, NEEDS) == expected


def test_changed_files(tmp_path, monkeypatch):
    """They are what the branch committed, what it did not commit, and new files, but nothing that main did since."""
    monkeypatch.setattr(packages, "ROOT", tmp_path)
    identity = ("-c", "user.name=x", "-c", "user.email=x@localhost")

    def git(*arguments):
        subprocess.run(("git", "-C", tmp_path, *identity, *arguments), check=True, capture_output=True)

    def commit(name):
        (tmp_path / name).write_text(name)
        git("add", name)
        git("commit", "-m", name)

    git("init", "--initial-branch", "main")
    commit("old")
    git("checkout", "-b", "branch")
    commit("committed")
    git("checkout", "main")
    commit("of main")
    git("checkout", "branch")
    (tmp_path / "old").write_text("changed")
    (tmp_path / "new").write_text("new")
    assert packages.changed_files() == ["committed", "old", "new"]
    git("branch", "-D", "main")
    with pytest.raises(SystemExit, match="compares with the branch main or origin/main; git knows neither"):
        packages.changed_files()


@pytest.mark.parametrize("name", KERNELS)
def test_every_argument_works_alone(name):
    """No other package is imported."""
    alone_suite.run(name)
