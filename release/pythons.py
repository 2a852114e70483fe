"""The Pythons of the sessions: the supported versions that run on this machine."""

import os
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

# A program by which a Python describes itself. JAX has no builds for free-threaded Pythons, and pip needs ssl.
QUESTION = """
import ctypes, ssl, sys, sysconfig
print("%d.%d" % sys.version_info[:2], sys.version_info.releaselevel, sys.implementation.name,
      sys.maxsize > 2**32, not sysconfig.get_config_var("Py_GIL_DISABLED"))
"""


def find(versions: Iterable[str]) -> dict[str, str]:
    """Return the path of a Python that runs, for every version that has one, in the order of `versions`."""
    found = {}
    for version in versions:
        if (path := next((path for path in candidates(version) if runs(path, version)), None)) is not None:
            found[version] = str(path)
    return found


def candidates(version: str) -> Iterator[Path]:
    """Yield the places of a version: the Python that runs now, the folders of PATH, and the folders of pyenv and uv.

    The commands of pyenv in PATH start only the versions that a folder's settings name, and fail for all others.
    """
    yield Path(sys.executable)
    name, home = f"python{version}", Path.home()
    yield from (Path(folder, name) for folder in os.get_exec_path())
    yield from sorted(Path(os.environ.get("PYENV_ROOT") or home / ".pyenv").glob(f"versions/*/bin/{name}"))
    data = Path(os.environ.get("XDG_DATA_HOME") or home / ".local/share")
    yield from sorted(Path(os.environ.get("UV_PYTHON_INSTALL_DIR") or data / "uv/python").glob(f"*/bin/{name}"))


def runs(path: Path, version: str) -> bool:
    """Return whether a file is a CPython that runs, of this version, released, and with 64 bits."""
    if not path.is_file():
        return False
    try:
        done = subprocess.run([path, "-I", "-c", QUESTION], capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0 and done.stdout.split() == [version, "final", "cpython", "True", "True"]
