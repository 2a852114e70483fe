"""The error metric, its thresholds, and comparisons that name what is wrong."""

from collections.abc import Callable

import jax
import numpy as np

# err(x, ref) = RMS(x - ref) / RMS(ref): outputs and states, then gradients.
TOLERANCE = {"float32": 1e-5, "bfloat16": 5e-3}

GRADIENT_TOLERANCE = {"float32": 1e-4, "bfloat16": 8e-3}

GATE_GRADIENT_TOLERANCE = {"float32": 1e-4, "bfloat16": 2e-2}

# Of gradients that are differences of two rounded gradients, which are almost equal where one token outweighs others.
AMPLIFIED = {"float32": 1e-4, "bfloat16": 3e-2}

# The error of one stage on the oracle's arguments; its results are float32 whatever the inputs are.
STAGE_TOLERANCE = 1e-6

_GATE_LIKE = ("g", "gk", "g_gamma", "beta", "b", "w", "i", "f", "initial_state.m", "dt", "A", "D", "dt_bias")


def tolerance(name: str, dtype: str) -> float:
    """Return the tolerance of a result or, named with a leading d, a gradient of an operator."""
    if name.partition(".")[0] in ("o", "final_state"):
        return TOLERANCE[dtype]
    kind = GATE_GRADIENT_TOLERANCE if name[1:] in _GATE_LIKE else GRADIENT_TOLERANCE
    return kind[dtype]


def by_part(results: dict) -> dict:
    """Return results by name of which some are states of several arrays, as arrays by name."""
    parts = jax.tree_util.tree_leaves_with_path
    return {name + jax.tree_util.keystr(path): y for name, tree in results.items() for path, y in parts(tree)}


def error(x, ref) -> float:
    """Return RMS(x - ref) / RMS(ref) in float64; infinity if x is not finite, or not zero where ref is all zero."""
    x, ref = np.asarray(x, np.float64), np.asarray(ref, np.float64)
    if x.shape != ref.shape or not np.isfinite(x).all():
        return float("inf")
    size = np.sqrt(np.mean(ref**2)) if ref.size else 0.0
    wrong = np.sqrt(np.mean((x - ref) ** 2)) if ref.size else 0.0
    return float(wrong / size) if size > 0 else (0.0 if wrong == 0 else float("inf"))


def assert_close(name: str, x, ref, tolerance: float) -> float:
    """Fail unless error(x, ref) <= tolerance, naming the worst coordinate and both values; return the error."""
    x, ref = np.asarray(x, np.float64), np.asarray(ref, np.float64)
    assert x.shape == ref.shape, f"{name}: shape {x.shape}, reference {ref.shape}"
    err = error(x, ref)
    if not err <= tolerance:
        distance = np.where(np.isfinite(x), np.abs(x - ref), np.inf)
        worst = np.unravel_index(np.argmax(distance), ref.shape)
        raise AssertionError(
            f"{name}: error {err:.3e} > {tolerance:.1e}; worst at {tuple(int(i) for i in worst)}: "
            f"got {x[worst]:.9g}, reference {ref[worst]:.9g}"
        )
    return err


def with_gradients(fn: Callable) -> Callable:
    """Return a function of x, cu_seqlens and cotangents: the results of fn with the gradients of all inputs x."""

    def run(x, cu_seqlens, cotangents):
        results, pullback = jax.vjp(lambda y: fn(y, cu_seqlens), x)
        return results | {f"d{name}": dx for name, dx in pullback(cotangents)[0].items()}

    return run
