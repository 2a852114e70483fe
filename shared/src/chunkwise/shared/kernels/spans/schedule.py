"""The order of products in a kernel.

The matrix unit takes products in the order of the program; where a product waits for another one, all products after it
wait, too. So a chain of such products is cut into stages, of a few heads each, and the stages are interleaved: products
of other stages stand between two products of one stage.
"""

from collections.abc import Callable, Generator, Iterable, Iterator
from typing import TypeVar

T = TypeVar("T")


def software_pipeline(stages: Iterable[Iterator]) -> Iterator[None]:
    """Run stages side by side, each one round behind the stage that began before it.

    A stage is a generator that yields where it would wait. A round begins the next stage, and takes every stage that
    has begun to its next yield, beginning with the latest.

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


def run_each(stage: Callable[[slice], Iterator], heads: int, some: int) -> None:
    """Run a stage for `some` heads at a time, by `software_pipeline`."""
    for _ in software_pipeline(stage(slice(first, min(first + some, heads))) for first in range(0, heads, some)):
        pass


def interleave(order: str, **each: Iterator) -> None:
    """Take the next item of iterators in an order of their names, which are one letter each.

    Past its end an iterator does nothing. The caller calls `finish` for iterators that the order does not finish.
    """
    for name in order:
        next(each[name], None)


def finish(stage: Generator[None, None, T] | Iterator[None]) -> T:
    """Run a stage to its end, and return its result; None for an iterator that has none."""
    while True:
        try:
            next(stage)
        except StopIteration as end:
            return end.value
