"""Transposes that a caller chooses, and sentences for derivatives that a kernel does not have.

A sentence is raised where JAX would say something else, or nothing. A function with a gradient of its own has no
forward mode, and JAX says so without its name. But JAX makes a gradient out of forward mode, too, which it then
transposes. So the error cannot be raised where a tangent is made. It is raised where a tangent is computed: a tangent
goes through a linear primitive that has a transpose, and no value.
"""

import functools
from collections.abc import Callable
from typing import Any, NoReturn, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import core
from jax.interpreters import ad, batching, mlir

T = TypeVar("T")


def in_reverse(x: object, forward: str, again: str | None = None) -> Any:
    """Return a tree of arrays as it is; a derivative in forward mode raises NotImplementedError.

    Args:
      x: arguments of a function. None and arrays without a gradient pass.
      forward: the sentence for forward mode.
      again: the sentence for the derivative of a gradient; None where a gradient can be differentiated.
    """

    def guard(y):
        # An array whose values are known has no derivative.
        traced = isinstance(y, jax.core.Tracer) and jnp.issubdtype(y.dtype, jnp.floating)
        return _guarded(forward, again, y) if traced else y

    return jax.tree.map(guard, x)


def _same(x: T) -> T:
    return x


def linear(x: object, transpose: Callable, forward: Callable = _same, back: Callable = _same) -> Any:
    """Return forward(x), by default x: a linear function of a tree of arrays, with the transpose of the caller.

    `custom_linear_solve` is the one linear function of JAX whose transpose a caller can choose; every transform takes
    it, and it has every derivative. The system to solve is `back`, by default the identity. JAX differentiates it alone
    for what the functions read beside x; for the derivative of that it is the inverse of forward.
    """
    return lax.custom_linear_solve(back, x, lambda _, y: forward(y), lambda _, y: transpose(y))


def of_kernel(name: str, x: object) -> Any:
    """Return a tree of arrays as it is, arguments of the kernel of the function of this name: see `in_reverse`."""
    return in_reverse(x, f'{name} has no forward-mode derivative under "pallas"; use implementation="xla".')


@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def _guarded(forward: str, again: str | None, x: jax.Array) -> jax.Array:
    return x


@_guarded.defjvp
def _guarded_jvp(forward, again, primals, tangents):
    (x,), (dx,) = primals, tangents
    return x if again is None else _differentiated(again, x), _transposed_only.bind(dx, sentence=forward)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _differentiated(sentence: str, x: jax.Array) -> jax.Array:
    return x


@_differentiated.defjvp
def _differentiated_jvp(sentence, primals, tangents) -> NoReturn:
    raise NotImplementedError(sentence)


def _refuse(*_, sentence: str) -> NoReturn:
    raise NotImplementedError(sentence)


_transposed_only = core.Primitive("transposed_only")
_transposed_only.def_impl(_refuse)
_transposed_only.def_abstract_eval(lambda x, *, sentence: x)
mlir.register_lowering(_transposed_only, _refuse)
batching.defvectorized(_transposed_only)
ad.deflinear2(_transposed_only, lambda cotangent, x, *, sentence: [cotangent])
