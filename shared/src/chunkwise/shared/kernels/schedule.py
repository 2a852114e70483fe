"""The order of products in a kernel.

The matrix unit takes products in the order of the program, and where one waits for another, all behind it wait too. So
work that consists of products that wait for one another is cut into stages, a few heads each, and the stages are
interleaved: between two products of one stage stand those of others.
"""

import contextlib
import contextvars
import functools
import importlib.resources
import json
from collections.abc import Iterable, Iterator, Mapping
from types import MappingProxyType

from chunkwise.shared import chips

# Orders by (package, kernel) in place of those of the package.
_injected: contextvars.ContextVar[Mapping] = contextvars.ContextVar("injected_orders", default=MappingProxyType({}))
# The generation whose orders serve those that have none of their own.
_SEARCHED = "v6e"


def software_pipeline(stages: Iterable[Iterator]) -> Iterator[None]:
    """Run stages side by side, each one step behind the stage that began before it.

    A stage is a generator that yields where it would wait. A round begins the next stage, and takes every stage that
    has begun one step further, the latest first.

    Yields:
      None after every round, so that the caller can put other products between two rounds.
    """
    waiting, running, done = iter(stages), [], object()
    while True:
        started = next(waiting, None)
        if started is not None:
            running.insert(0, started)
        if not running:
            return
        running = [stage for stage in running if next(stage, done) is not done]
        yield


def interleave(order: str, **each: Iterator) -> None:
    """Take iterators one step further at a time, in an order of their names, which are one letter each.

    A step past the end of an iterator does nothing. The caller finishes what the order leaves.
    """
    for name in order:
        next(each[name], None)


@functools.cache
def _orders(package: str) -> dict:
    return json.loads(importlib.resources.files(package).joinpath("orders.json").read_text())


def find_order(package: str, kernel: str, size: int, otherwise: str) -> str:
    """Return the order of a kernel's iterators for `interleave`, as a search found it.

    The file `orders.json` of the package holds orders by kernel, size and TPU generation.

    Args:
      package: the name of the package, as it is imported.
      kernel: which of its kernels.
      size: of the work of a grid step, in the unit of the kernel.
      otherwise: the order where none was searched.
    """
    if (package, kernel) in _injected.get():
        return _injected.get()[package, kernel]
    found = _orders(package).get(kernel, {}).get(str(size), {})
    return found.get(chips.current(), found.get(_SEARCHED, otherwise))


@contextlib.contextmanager
def injected_orders(package: str, **orders: str) -> Iterator[None]:
    """Trace kernels with these orders, by the name of the kernel: what a search does.

    JAX remembers what it traced, so a search clears its caches, or traces a function that is new.
    """
    token = _injected.set({**_injected.get()} | {(package, kernel): order for kernel, order in orders.items()})
    try:
        yield
    finally:
        _injected.reset(token)
