"""The versions of the distributions: where each package gets its `__version__`, and their comparison."""

import pkgutil
from collections.abc import Iterable
from importlib import metadata

UNKNOWN = "unknown"


def of(module: str) -> str:
    """Return the version of the distribution that brings a package, such as "chunkwise.chunk_h".

    A source tree that is not installed has the version "unknown".
    """
    try:
        return metadata.version(module.replace(".", "-").replace("_", "-"))
    except metadata.PackageNotFoundError:
        return UNKNOWN


def check_siblings(folders: Iterable[str], version: str) -> None:
    """Raise ImportError if a package in one of these folders has another version than `version`.

    All packages of a release belong together: one of another release would fail later, with an error that says nothing.
    A source tree that is not installed passes.
    """
    names = {module.name for module in pkgutil.iter_modules(folders)}
    versions = {name: of(f"chunkwise.{name}") for name in sorted(names)} if version != UNKNOWN else {}
    wrong = [
        f"chunkwise-{name.replace('_', '-')} {other}"
        for name, other in versions.items()
        if other not in (version, UNKNOWN)
    ]
    if wrong:
        raise ImportError(
            f"the packages of chunkwise must have one version, that of chunkwise-shared, {version}; got "
            f"{', '.join(wrong)}: install all of them from one release."
        )
