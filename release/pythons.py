"""The Pythons of the sessions: which of those that are supported are on this machine, and run."""

import os
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

# What a Python says about itself. JAX has no builds for those without a lock around the interpreter, and pip needs ssl.
QUESTION = """
import ctypes, ssl, sys, sysconfig
print("%d.%d" % sys.version_info[:2], sys.version_info.releaselevel, sys.implementation.name,
      sys.maxsize > 2**32, not sysconfig.get_config_var("Py_GIL_DISABLED"))
"""


def find(versions: Iterable[str]) -> dict[str, str]:
    """Return the path of a Python that runs for every version that has one, in the order of `versions`."""
    found = {}
    for version in versions:
        if (path := next((path for path in candidates(version) if runs(path, version)), None)) is not None:
            found[version] = str(path)
    return found


def candidates(version: str) -> Iterator[Path]:
    """Yield where a version may lie: what runs now, the folders of PATH, and those of pyenv and uv.

    The commands of pyenv in PATH start the versions that a folder asks for, and fail for all others.
    """
    yield Path(sys.executable)
    name, home = f"python{version}", Path.home()
    yield from (Path(folder, name) for folder in os.get_exec_path())
    yield from sorted(Path(os.environ.get("PYENV_ROOT") or home / ".pyenv").glob(f"versions/*/bin/{name}"))
    data = Path(os.environ.get("XDG_DATA_HOME") or home / ".local/share")
    yield from sorted(Path(os.environ.get("UV_PYTHON_INSTALL_DIR") or data / "uv/python").glob(f"*/bin/{name}"))


def runs(path: Path, version: str) -> bool:
    """Return whether a file is a released CPython of a version, of 64 bits, that runs."""
    if not path.is_file():
        return False
    try:
        done = subprocess.run([path, "-I", "-c", QUESTION], capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0 and done.stdout.split() == [version, "final", "cpython", "True", "True"]
