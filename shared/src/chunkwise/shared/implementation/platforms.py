"""Two plain forms of one computation; the platform that a program is lowered for chooses one of them."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import jax
from jax import lax

_on_every_platform = False


def choose(on_gpu: Callable, otherwise: Callable, *args: object) -> Any:
    """Return on_gpu(*args) in a program that is lowered for an NVIDIA or AMD GPU, and otherwise(*args) in others.

    Both must return arrays of the same shapes and types. Where the default backend is a GPU both are traced, and a
    gradient outside of jit has residuals of both. Elsewhere nobody pays for that: the form for GPUs is not traced.
    """
    if _on_every_platform:
        return on_gpu(*args)
    if jax.default_backend() != "gpu":
        return otherwise(*args)
    return lax.platform_dependent(*args, cuda=on_gpu, rocm=on_gpu, default=otherwise)


@contextlib.contextmanager
def gpu_forms() -> Iterator[None]:
    """Take the forms for GPUs on every platform: for tests, and to compile for a GPU where there is none.

    It acts while a function is traced, and JAX remembers traces: clear its caches before and after.
    """
    global _on_every_platform
    before, _on_every_platform = _on_every_platform, True
    try:
        yield
    finally:
        _on_every_platform = before
