"""Checks of values: at once where they are known, and by `jax.experimental.checkify` where they are traced."""

import contextlib
import functools
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import checkify


class Fault(NamedTuple):
    """A fault that the values of arrays may have.

    Attributes:
      wrong: scalar bool, whether the values are wrong.
      message: the error message, with names in braces for numbers.
      numbers: returns the numbers of the message, scalar arrays by name.
    """

    wrong: jax.Array
    message: str
    numbers: Callable[[], dict[str, Any]] = dict


def fault(wrong: jax.Array, y: jax.Array, rule: str, more: str = "") -> Fault:
    """Return the fault of an array that is `wrong` in some places; the message has the first one and its value."""
    at = ", ".join(f"{{i{axis}}}" for axis in range(y.ndim))
    integers = jnp.issubdtype(y.dtype, jnp.integer)
    form, y = ("{value}", y) if integers else ("{value:g}", y.astype(jnp.float32))
    return Fault(jnp.any(wrong), f"{rule}; got {form} at [{at}]{more}.", functools.partial(_first, wrong, y))


def _first(wrong: jax.Array, y: jax.Array) -> dict[str, jax.Array]:
    """Return the indices and the value of the first wrong entry; reductions alone find it, which run on any mesh."""
    found = {}
    for axis in range(y.ndim):
        others = tuple(other for other in range(y.ndim) if other != axis)
        found[f"i{axis}"] = jnp.argmax(jnp.any(wrong, axis=others))
        wrong &= lax.broadcasted_iota(jnp.int32, y.shape, axis) == found[f"i{axis}"]
    return found | dict(value=jnp.sum(jnp.where(wrong, y, jnp.zeros((), y.dtype)), dtype=y.dtype))


def are_known(arrays: Iterable[Any]) -> bool:
    """Return whether all values are known: outside of jit, or as constants inside."""
    return not any(isinstance(x, jax.core.Tracer) for x in arrays)


def check_values(arrays: Iterable[Any], find: Callable[[], Iterable[Fault]]) -> None:
    """Check the values of arrays: at once if they are known, else by `checkify.check`, which the caller makes pure."""
    known = are_known(arrays)
    # Inside of jit, JAX would otherwise trace computations on constants, too.
    with jax.ensure_compile_time_eval() if known else contextlib.nullcontext():
        for fault in find():
            if not known:
                checkify.check(jnp.logical_not(fault.wrong), fault.message, **fault.numbers())
            elif fault.wrong:
                raise ValueError(fault.message.format(**fault.numbers()))


def check_known_values(arrays: Iterable[Any], find: Callable[[], Iterable[Fault]]) -> None:
    """Check the values of arrays if all of them are known."""
    arrays = tuple(arrays)
    if are_known(arrays):
        check_values(arrays, find)
