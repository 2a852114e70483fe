"""Gradient wiring that the packages share."""

import functools
from collections.abc import Callable

import jax


def without_gradient(fn: Callable, what: str) -> Callable:
    """Return `fn` of array arguments such that differentiating it says clearly that there is no gradient.

    Args:
      fn: a function of positional arrays (None allowed).
      what: the subject of the message.
    """
    wrapped = jax.custom_vjp(fn)

    def forward(*args):
        raise NotImplementedError(f'{what} has no gradient; use implementation="xla".')

    wrapped.defvjp(forward, lambda residuals, cotangent: ())
    return functools.wraps(fn)(lambda *args: wrapped(*args))
