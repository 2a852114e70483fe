"""Gradients of programs beside central differences of their definitions."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from chunkwise.shared.testing.compare import GRADIENT_TOLERANCE, assert_close, with_gradients


@functools.lru_cache(maxsize=8)
def gradient_program(fn: Callable) -> Callable:
    """Return `with_gradients` of fn, jitted: one program for all tests of one function."""
    return jax.jit(with_gradients(fn))


def numeric_gradients(fn, args: dict, cotangents) -> dict[str, np.ndarray]:
    """Return the gradients of sum(fn(**args) * cotangents) by central differences of a float64 numpy function."""
    args = {name: np.array(x, np.float64) for name, x in args.items()}

    def loss():
        return sum(np.sum(y * c) for y, c in zip(jax.tree.leaves(fn(**args)), cotangents, strict=True))

    grads = {name: np.zeros(x.shape) for name, x in args.items()}
    step = 1e-5
    for name, x in args.items():
        for at in np.ndindex(x.shape):
            middle = x[at]
            x[at] = middle + step
            above = loss()
            x[at] = middle - step
            grads[name][at] = (above - loss()) / (2 * step)
            x[at] = middle
    return grads


def assert_gradients(fn, definition, args: dict, tolerance: float = GRADIENT_TOLERANCE["float32"]) -> None:
    """Fail unless fn(**args), plain and under remat, has the numeric gradients of its definition in numpy."""
    rng = np.random.default_rng(1)
    shapes = jax.tree.leaves(jax.eval_shape(lambda args: fn(**args), args))
    cotangents = [jnp.asarray(rng.standard_normal(y.shape), y.dtype) for y in shapes]

    def loss(run, args):
        outputs = jax.tree.leaves(run(**args))
        return sum(jnp.vdot(y, c) for y, c in zip(outputs, cotangents, strict=True))

    expected = numeric_gradients(definition, args, [np.asarray(c, np.float64) for c in cotangents])
    labels = {"": fn, " under remat": jax.checkpoint(fn)}
    found = jax.jit(lambda args: {x: jax.grad(functools.partial(loss, run))(args) for x, run in labels.items()})(args)
    for label, grads in found.items():
        for name, want in expected.items():
            assert_close(f"d{name}{label}", grads[name], want, tolerance)
