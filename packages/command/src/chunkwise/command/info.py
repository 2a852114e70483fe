"""`chunkwise info`: the installed packages, the devices, and the implementations that None selects here."""

import pkgutil
import platform
from importlib import metadata

import jax

import chunkwise
from chunkwise.pipeline import operators, stages
from chunkwise.shared.call import checks

LIBRARIES = ("jax", "jaxlib", "libtpu", "numpy")
# Distributions that no package needs: the root, which only installs others, and the two for flax and other hosts.
ROOT, INTEGRATIONS, FLAX = "chunkwise", "chunkwise-integrations", "flax"


def version(distribution: str) -> str | None:
    """Return the version of an installed distribution, None if there is none."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def importable() -> set[str]:
    """Return the chunkwise distributions that can be imported, installed or as a source tree."""
    return {f"chunkwise-{module.name.replace('_', '-')}" for module in pkgutil.iter_modules(chunkwise.__path__)}


def packages() -> dict[str, str | None]:
    """Return the version of every chunkwise distribution; None for a bare source tree, or if it is missing."""
    return {name: version(name) for name in sorted({ROOT, INTEGRATIONS} | importable())}


def selected() -> dict[str, str]:
    """Return the implementations that None selects here, for keys and values of 128 channels."""
    return {
        kernel.name: checks.choose_implementation(None, kernel.implementations, on_tpu=kernel.implementations[-1])
        for kernel in (*operators.OPERATORS.values(), *stages.STAGES, *stages.PARTS)
    }


def gather() -> dict:
    """Return everything, by section."""
    return {
        "packages": packages(),
        "libraries": {"python": platform.python_version()} | {name: version(name) for name in (*LIBRARIES, FLAX)},
        "backend": jax.default_backend(),
        "devices": [f"{device.id}: {device.device_kind}" for device in jax.devices()],
        "implementation": selected(),
    }
