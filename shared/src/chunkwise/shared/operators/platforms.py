"""Two plain forms of one computation, of which the platform that a program is lowered for has its own."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from jax import lax

_on_every_platform = False


def choose(on_gpu: Callable, otherwise: Callable, *args: Any) -> Any:
    """Return on_gpu(*args) in a program that is lowered for an NVIDIA or AMD GPU, and otherwise(*args) in others.

    Both are traced, and must return arrays of the same shapes and types.
    """
    if _on_every_platform:
        return on_gpu(*args)
    return lax.platform_dependent(*args, cuda=on_gpu, rocm=on_gpu, default=otherwise)


@contextlib.contextmanager
def gpu_forms() -> Iterator[None]:
    """Take the forms for GPUs on every platform, for tests.

    It acts while a function is traced, and JAX remembers what it traced: clear its caches before and after.
    """
    global _on_every_platform
    before, _on_every_platform = _on_every_platform, True
    try:
        yield
    finally:
        _on_every_platform = before
