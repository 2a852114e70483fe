"""The launches of Pallas kernels in a program as JAX traces it, and how many of our functions stand before them."""

import math
import traceback
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple
from unittest import mock

import jax
from jax.experimental import pallas as pl
from jax.extend import core

import chunkwise
from chunkwise.shared import tuning


class Launch(NamedTuple):
    """The launch of a kernel for a TPU.

    Attributes:
      name: the name of the kernel.
      steps: how many grid steps the program runs in all; a size of the grid that only the run tells counts as 1.
      operations: how many operations of JAX its body has; an operation in a branch or loop counts once.
      table_bytes: the scalar memory that its tables take.
      array_bytes: the bytes of the arrays that it reads or writes.
    """

    name: str
    steps: int
    operations: int
    table_bytes: int
    array_bytes: int


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
            mapping = eqn.params["grid_mapping"]
            grid, first = mapping.grid, mapping.num_dynamic_grid_bounds
            steps = times * math.prod(size for size in grid if isinstance(size, int))
            tables = eqn.invars[first : first + mapping.num_index_operands]
            size = sum(tuning.smem_bytes(*x.aval.shape) for x in tables)
            arrays = [x.aval for x in (*eqn.invars[first + len(tables) :], *eqn.outvars)]
            moved = sum(x.size * x.dtype.itemsize for x in arrays)
            yield Launch(eqn.params["name"], steps, count_operations(eqn.params["jaxpr"]), size, moved)
            continue
        repeats = eqn.params["length"] if eqn.primitive.name == "scan" else 1
        for inner in _inner(eqn):
            yield from _walk(inner, times * repeats)


def launches(fn: Callable, *specs) -> list[Launch]:
    """Return the launches of `fn` for arguments of these shapes, in the order of the program.

    A launch counts once if it is in a branch, or in a loop whose number of iterations is not known.
    """
    return list(_walk(jax.make_jaxpr(fn)(*specs).jaxpr, 1))


def frames_of_launches(call: Callable[[], object]) -> list[list[str]]:
    """Return the names of our functions on the stack of every launch that a call traces, the outermost first."""
    seen, launch = [], pl.pallas_call

    def spy(*args, **kwargs):
        stack = traceback.extract_stack()
        seen.append([frame.name for frame in stack if frame.filename.startswith(tuple(chunkwise.__path__))])
        return launch(*args, **kwargs)

    jax.clear_caches()
    with mock.patch.object(pl, "pallas_call", spy):
        jax.eval_shape(call)
    return seen


def assert_frames(call: Callable[[], object], most: int) -> None:
    """Fail unless a call launches kernels, each of them behind at most so many of our functions."""
    deepest = max(frames_of_launches(call), key=len)
    assert len(deepest) <= most, deepest
