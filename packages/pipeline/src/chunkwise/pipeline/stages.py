"""The tables of the stages of the chain, and of the parts of a layer around its operator.

Checks and tests, which treat all of them alike, read these tables.
"""

import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from chunkwise.causal_conv1d import causal_conv1d
from chunkwise.chunk_h import chunk_fwd_h, chunk_gated_delta_rule_fwd_h
from chunkwise.chunk_o import chunk_fwd_o
from chunkwise.cumsum import chunk_local_cumsum
from chunkwise.kkt import chunk_scaled_dot_kkt
from chunkwise.norm_gated import rms_norm_gated
from chunkwise.shared.testing import cases, conv_norm_oracle
from chunkwise.shared.testing import stage_oracle as exact
from chunkwise.solve_tril import solve_tril
from chunkwise.wy_fast import recompute_w_u


@dataclass(frozen=True)
class Stage:
    """A stage of the chain, or a part of a layer: a function of arrays, and its definition.

    Attributes:
      function: runs it, from the arrays by name, and from `chunk_size` and `cu_seqlens` if it takes them.
      definition: computes it in float64, from arguments of the same names.
      reads: the names of the arrays, as `inputs` gives them.
      results: the names of its results, as `definition` returns them.
      static: static arguments of the function.
      implementations: its implementations; the last one is chosen on a TPU.
      inputs: from a `chunkwise.shared.testing.Case` to the arrays by name.
      rounds: whether the results are in the type of the inputs; otherwise they are float32.
    """

    function: Callable
    definition: Callable
    reads: tuple[str, ...]
    results: tuple[str, ...]
    static: tuple[tuple[str, Any], ...] = ()
    implementations: tuple[str, ...] = ("xla", "pallas")
    inputs: Callable[[cases.Case], dict] = cases.Case.arguments
    rounds: bool = False

    @property
    def name(self) -> str:
        """The name of the function."""
        return self.function.__name__

    def run(self, x: Mapping[str, jax.Array], chunk_size: int, cu_seqlens=None, **options) -> dict[str, jax.Array]:
        """Return the results by name, given at least the arrays that the stage reads."""
        return self._named(self.function, x, dict(self.static) | options, chunk_size=chunk_size, cu_seqlens=cu_seqlens)

    def define(self, x: Mapping, chunk_size: int, cu_seqlens=None) -> dict[str, np.ndarray]:
        """Return the same in float64, by the definition."""
        return self._named(self.definition, x, {}, chunk_size=chunk_size, cu_seqlens=cu_seqlens)

    def _named(self, function: Callable, x: Mapping, options: dict, **cut) -> dict:
        accepted = inspect.signature(function).parameters
        options = options | {name: y for name, y in cut.items() if name in accepted}
        results = function(**{name: x[name] for name in self.reads}, **options)
        return dict(zip(self.results, results if isinstance(results, tuple) else (results,), strict=True))


def _states_of_values(k, v, g_cum, initial_state, chunk_size: int, cu_seqlens) -> tuple[np.ndarray, np.ndarray]:
    """Return the definition of the states without a delta rule, which writes the values as they are."""
    h, _, final_state = exact.states(k, None, v, g_cum, initial_state, chunk_size, cu_seqlens)
    return h, final_state


def _with_new_values(case: cases.Case) -> dict[str, jax.Array]:
    """Return the arguments of a case, whose values are those that the delta rule writes."""
    x = case.arguments()
    return x | {"v": x["v_new"]}


_FINAL = (("output_final_state", True),)

STAGES = (
    Stage(chunk_local_cumsum, exact.cumsum, ("g",), ("g_cum",)),
    Stage(chunk_scaled_dot_kkt, exact.kkt, ("k", "beta", "g_cum"), ("A",)),
    Stage(solve_tril, exact.inverse, ("A",), ("A_inv",)),
    Stage(recompute_w_u, exact.w_u, ("k", "v", "beta", "A_inv", "g_cum"), ("w", "u")),
    Stage(
        chunk_gated_delta_rule_fwd_h, exact.states, ("k", "w", "u", "g_cum", "initial_state"),
        ("h", "v_new", "final_state"), _FINAL,
    ),
    Stage(chunk_fwd_h, _states_of_values, ("k", "v", "g_cum", "initial_state"), ("h", "final_state"), _FINAL),
    Stage(chunk_fwd_o, exact.output, ("q", "k", "v", "h", "g_cum"), ("o",), inputs=_with_new_values, rounds=True),
)  # fmt: skip

_WIDTH = 4


def _convolution_inputs(case: cases.Case) -> dict:
    """Return the values of a case as channels side by side, with weights and initial states."""
    rng, x = np.random.default_rng(0), case.arguments()["v"]
    N, D = case.B if case.lengths is None else len(case.lengths), case.HV * case.V
    shapes = {"weight": (D, _WIDTH), "bias": (D,), "initial_state": (N, _WIDTH - 1, D)}
    drawn = {name: jnp.asarray(rng.standard_normal(shape), x.dtype) for name, shape in shapes.items()}
    return drawn | {"x": x.reshape(case.B, case.T, D)}


def _norm_inputs(case: cases.Case) -> dict:
    """Return the values of a case with a gate and a weight; for a norm nothing is padding."""
    x = jnp.nan_to_num(case.arguments()["v"])
    return {"x": x, "z": jnp.flip(x, axis=1), "weight": jnp.linspace(0.5, 1.5, case.V, dtype=x.dtype)}


# The parts of a layer around its operator.
PARTS = (
    Stage(
        causal_conv1d, functools.partial(conv_norm_oracle.causal_conv1d, name="silu"),
        ("x", "weight", "bias", "initial_state"), ("y", "final_state"), (*_FINAL, ("activation", "silu")),
        inputs=_convolution_inputs, rounds=True,
    ),
    Stage(
        rms_norm_gated, conv_norm_oracle.rms_norm_gated, ("x", "z", "weight"), ("y",), inputs=_norm_inputs, rounds=True
    ),
)  # fmt: skip
