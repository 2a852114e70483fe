"""The launches of Pallas kernels in a program, as JAX traces it: nothing is lowered, compiled or run."""

import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
from jax.extend import core


class Launch(NamedTuple):
    """The launch of a kernel for a TPU.

    Attributes:
      name: the name of the kernel.
      steps: how many grid steps the program runs in all; 0 if a size of the grid is not known.
      operations: how many operations of JAX its body has; an operation in a branch or loop counts once.
    """

    name: str
    steps: int
    operations: int


def _parts(value) -> Iterator[Any]:
    """Yield the jaxprs in a parameter of an operation."""
    for x in value if isinstance(value, (tuple, list)) else (value,):
        if isinstance(x, core.ClosedJaxpr):
            yield x.jaxpr
        elif hasattr(x, "eqns"):
            yield x


def _inner(eqn) -> Iterator[Any]:
    for value in eqn.params.values():
        yield from _parts(value)


def count_operations(jaxpr) -> int:
    """Return the number of operations of a jaxpr, also inside of its parts."""
    return sum(1 + sum(map(count_operations, _inner(eqn))) for eqn in jaxpr.eqns)


def _walk(jaxpr, times: int) -> Iterator[Launch]:
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "pallas_call":
            if eqn.params["interpret"]:
                continue
            grid = eqn.params["grid_mapping"].grid
            known = all(isinstance(size, int) for size in grid)
            steps = times * math.prod(grid) if known else 0
            yield Launch(eqn.params["name"], steps, count_operations(eqn.params["jaxpr"]))
            continue
        repeats = eqn.params["length"] if eqn.primitive.name == "scan" else 1
        for inner in _inner(eqn):
            yield from _walk(inner, times * repeats)


def launches(fn: Callable, *specs) -> list[Launch]:
    """Return the launches of `fn` for arguments of these shapes, in the order of the program.

    A launch counts once if it is in a branch, or in a loop whose number of iterations is not known.
    """
    return list(_walk(jax.make_jaxpr(fn)(*specs).jaxpr, 1))
