"""An operator beside the float64 recurrence: outputs, final states and gradients, by one program for a kind of call."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from chunkwise.shared.testing import oracle
from chunkwise.shared.testing.compare import GATE_GRADIENT_TOLERANCE, GRADIENT_TOLERANCE, TOLERANCE, assert_close
from chunkwise.shared.testing.inputs import poison_padding
from tests.laws import law_reference

RESULTS = ("o", "final_state")
GATES = ("g", "beta", "b", "w", "A_log", "dt_bias", "g_gamma")
# What the recurrence is told of a call; the rest says how it is computed.
_TOLD = ("cu_seqlens", "segment_ids", "scale", "use_qk_l2norm_in_kernel")
_FLOAT16 = {"float16": 5e-4}  # half of 2^-10


def limit(name: str, dtype: str, x: dict[str, jax.Array]) -> float:
    """Return the tolerance of a result or a gradient: that of what q, k and v are, or of its own rounding."""
    gradients = GATE_GRADIENT_TOLERANCE if name[1:] in GATES else GRADIENT_TOLERANCE
    table = TOLERANCE if name in RESULTS else gradients
    computed = "bfloat16" if all(x[key].dtype == jnp.bfloat16 for key in "qkv") else "float32"
    return max(table[computed], (table | _FLOAT16)[dtype])


def without_laws(x: dict[str, jax.Array], options: dict[str, Any]) -> tuple[dict, Callable[[dict], dict]]:
    """Return inputs with the decays, erase and write gates that laws make of raw ones.

    And a function from gradients of these inputs to gradients of the raw ones.
    """
    if not (law := options.get("use_gate_in_kernel")):
        return x, lambda gradients: gradients
    erases, writes = (options.get(f"use_{kind}_sigmoid_in_kernel") for kind in ("erase", "write"))
    step = "b" if erases else "beta"
    raw = erases or options.get("use_beta_sigmoid_in_kernel")
    bounds = {name: options[name] for name in ("lower_bound", "allow_neg_eigval") if name in options}
    given = (x[name] for name in ("g", step, "A_log", "dt_bias"))
    made, pull = law_reference(*given, **bounds, law=law if isinstance(law, str) else None)
    decayed = {name: y for name, y in x.items() if name not in ("A_log", "dt_bias")} | {"g": made["g"]}
    decayed |= {step: made["beta"]} if raw else {}
    decayed |= {"w": 1 / (1 + np.exp(-np.asarray(x["w"], np.float64)))} if writes else {}

    def raw_gradients(gradients):
        found = pull(gradients["g"], gradients[step])
        of_step = found.pop("beta")
        found |= {step: of_step} if raw else {}
        found |= {"w": gradients["w"] * decayed["w"] * (1 - decayed["w"])} if writes else {}
        return gradients | found

    return decayed, raw_gradients


@functools.partial(jax.jit, static_argnums=(0, 1))
def _outputs(operator, static, fixed, x):
    return operator(**x, **fixed, **dict(static))


@functools.partial(jax.jit, static_argnums=(0, 1))
def _gradients(operator, static, fixed, x, cotangents):
    results, pull = jax.vjp(lambda x: operator(**x, **fixed, **dict(static)), x)
    return results, pull(cotangents)[0]


def run(operator: Callable, x: dict[str, jax.Array], cotangents, **options) -> tuple:
    """Return results, and gradients if there are cotangents; arrays of the options are traced, the rest is static."""
    fixed = {name: y for name, y in options.items() if isinstance(y, jax.Array | np.ndarray)}
    static = tuple((name, options[name]) for name in sorted(options) if name not in fixed)
    if cotangents is None:
        return _outputs(operator, static, fixed, x), {}
    return _gradients(operator, static, fixed, x, tuple(cotangents))


def assert_recurrence(
    operator: Callable, x: dict[str, jax.Array], *, gradients: bool = True, but_for=(), limit=limit,
    expected: Callable = oracle.reference, told: tuple[str, ...] = _TOLD,
    values: str = "v", **options,
) -> dict[str, jax.Array]:  # fmt: skip
    """Fail unless results are those of the recurrence on the same inputs, and zeros in the padding, which is NaN.

    Args:
      operator: a function from inputs by name to outputs and final states, the same one for all tests of a program.
      x: inputs by name; with an initial state there is a final state, which has a cotangent too.
      gradients: whether to compare the gradients of all inputs.
      but_for: inputs whose gradients must only be numbers.
      limit: from a name, a type and the inputs to a tolerance.
      expected: as `oracle.reference`.
      told: the options that `expected` gets.
      values: the name of the input that is as large as the output.
      options: further arguments of the operator. Arrays are traced.

    Returns:
      The results by name.
    """
    options = {"output_final_state": "initial_state" in x} | options
    packing = {name: options[name] for name in ("cu_seqlens", "segment_ids") if options.get(name) is not None}
    spoilt, rng = poison_padding(x, **packing), np.random.default_rng(1)
    kinds, _ = jax.eval_shape(lambda: run(operator, spoilt, None, **options))
    do, dht = (None if y is None else jnp.asarray(rng.standard_normal(y.shape), y.dtype) for y in kinds)
    decayed, raw_gradients = without_laws(x, options)
    seen = {name: y for name, y in options.items() if name in told}
    outputs, found = run(operator, spoilt, (do, dht) if gradients else None, **options)
    if gradients:
        *want, slopes = expected(**decayed, **seen, do=do, dht=dht)
    else:
        want, slopes = expected(**decayed, **seen), {}
    assert outputs[0].dtype == x[values].dtype
    got = dict(zip(RESULTS, outputs, strict=True))
    if not options["output_final_state"]:
        assert got.pop("final_state") is None
    wanted = dict(zip(RESULTS, want, strict=True))
    if gradients:
        slopes = raw_gradients(slopes)
        assert found.keys() == slopes.keys()
        for name, y in found.items():
            assert y.dtype == x[name].dtype, f"d{name} is {y.dtype}"
            got[f"d{name}"], wanted[f"d{name}"] = y, slopes[name]
    T = x[values].shape[1]
    padding = np.isnan(np.asarray(spoilt[values], np.float32)).any(axis=(2, 3))
    for name, y in got.items():
        if name[1:] in but_for:
            assert jnp.all(jnp.isfinite(y)), name
        else:
            assert_close(name, y, wanted[name], limit(name, y.dtype.name, x))
        if y.shape[1:2] == (T,) and name[1:] != "initial_state":
            assert not np.asarray(y, np.float32)[padding].any(), f"{name} of padding is not zero"
    return got
