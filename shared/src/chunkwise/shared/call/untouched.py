"""Operators run by JAX's own functions, also inside of a model in which qwix replaces functions of JAX."""

import functools
import sys
from collections.abc import Callable
from typing import Any

import jax

_QWIX = "qwix._src.interception"


def qwix_is_imported() -> bool:
    """Return whether functions of JAX may be replaced: qwix has been imported."""
    return _QWIX in sys.modules


def run(function: Callable, *records: object) -> Any:
    """Return function(*records), with JAX's own functions in its gradient too.

    A model that qwix quantises runs with other functions in the place of JAX's products. They would round the products
    inside of an operator where nobody has traced these before, and take an operand for a weight of the same shape.
    """
    qwix = sys.modules[_QWIX]
    replaced = qwix.interception_manager.disable_interception()
    if not replaced:
        return function(*records)
    try:
        return _with_one_rule(qwix.disable_interceptions, function, records)
    finally:
        qwix.interception_manager.enable_interception(replaced)


def _with_one_rule(apart: Callable, function: Callable, records: tuple) -> Any:
    """Return function(*records) with one rule for its gradient, which runs under the decorator `apart`.

    JAX traces rules of derivatives late, such as at the end of a scan, when the functions are replaced again. This rule
    traces those of the function at once.
    """
    leaves, structure = jax.tree.flatten(records)
    is_array = [isinstance(x, jax.Array) for x in leaves]

    def call(*arrays):
        given = iter(arrays)
        return function(*structure.unflatten(next(given) if y else x for x, y in zip(leaves, is_array, strict=True)))

    fn = jax.custom_vjp(call)
    fn.defvjp(apart(functools.partial(jax.vjp, call)), apart(lambda pullback, dy: pullback(dy)))
    return fn(*(x for x, y in zip(leaves, is_array, strict=True) if y))
