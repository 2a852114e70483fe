"""The versions of the distributions: where each package gets its `__version__`."""

from importlib import metadata


def of(module: str) -> str:
    """Return the version of the distribution that brings a package, such as "chunkwise.chunk_h".

    A source tree that is not installed has the version "unknown".
    """
    try:
        return metadata.version(module.replace(".", "-").replace("_", "-"))
    except metadata.PackageNotFoundError:
        return "unknown"
