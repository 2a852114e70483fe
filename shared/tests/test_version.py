"""Packages of one release are imported, and packages of two releases are refused."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from chunkwise.shared import version


def install(folder: Path, **versions: str | None) -> Path:
    """Make packages in a folder as pip would leave them there; without a version as a source tree."""
    for name, number in versions.items():
        package = folder / "chunkwise" / name
        package.mkdir(parents=True)
        (package / "__init__.py").write_text("from chunkwise.shared import version")
        if number:
            info = folder / f"chunkwise_{name}-{number}.dist-info"
            info.mkdir()
            (info / "METADATA").write_text(f"Metadata-Version: 2.4\nName: chunkwise-{name}\nVersion: {number}\n")
    source = Path(version.__file__).parent
    for name in ("__init__.py", "version.py"):
        (folder / "chunkwise/shared" / name).write_text((source / name).read_text())
    return folder


def imported(folder: Path) -> subprocess.CompletedProcess:
    """Import a package of a folder in a process that sees no other packages."""
    command = (sys.executable, "-S", "-c", "import chunkwise.kda")
    return subprocess.run(command, env=os.environ | {"PYTHONPATH": str(folder)}, capture_output=True, text=True)


@pytest.mark.parametrize("versions", [("1.2", "1.2"), ("1.2", None), (None, "1.2"), (None, None)])
def test_packages_of_one_release(tmp_path, versions):
    shared, kda = versions
    done = imported(install(tmp_path, shared=shared, kda=kda))
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("older", ["kda", "shared"])
def test_packages_of_two_releases(tmp_path, older):
    versions = {"shared": "1.2", "kda": "1.2", "two_keys": "1.2"} | {older: "1.1"}
    done = imported(install(tmp_path, **versions))
    rule = f"the packages of chunkwise must have one version, that of chunkwise-shared, {versions['shared']}; got "
    assert re.search(re.escape(f"ImportError: {rule}chunkwise-kda {versions['kda']}"), done.stderr), done.stderr
