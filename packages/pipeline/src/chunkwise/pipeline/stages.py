"""The tables of the stages of the chain, and of the parts of a layer around its operator.

Checks and benchmarks, which treat all of them alike, read these tables.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl

from chunkwise.causal_conv1d import causal_conv1d
from chunkwise.causal_conv1d.cost import cost as causal_conv1d_cost
from chunkwise.chunk_h import chunk_fwd_h, chunk_gated_delta_rule_fwd_h
from chunkwise.chunk_h.config import cost as chunk_h_cost
from chunkwise.chunk_o import chunk_fwd_o
from chunkwise.chunk_o.config import cost as chunk_o_cost
from chunkwise.cumsum import chunk_local_cumsum
from chunkwise.cumsum.config import cost as cumsum_cost
from chunkwise.kkt import chunk_scaled_dot_kkt
from chunkwise.kkt.config import cost as kkt_cost
from chunkwise.norm_gated import rms_norm_gated
from chunkwise.norm_gated.cost import cost as norm_gated_cost
from chunkwise.shared.testing import cases, conv_norm_oracle
from chunkwise.shared.testing import stage_oracle as exact
from chunkwise.solve_tril import solve_tril
from chunkwise.solve_tril.config import cost as solve_tril_cost
from chunkwise.wy_fast import recompute_w_u
from chunkwise.wy_fast.config import cost as wy_fast_cost


@dataclass(frozen=True)
class Stage:
    """A stage of the chain, or a part of a layer: functions of its arguments that run it and that define it.

    Attributes:
      name: its name in its package.
      run: runs it, from a dict x of arguments, further keywords of the stage, and the chunk size.
      definition: computes it in float64, from a dict x of arguments, cu_seqlens and the chunk size.
      reads: the names of its arguments, as `inputs` gives them.
      results: the names of its results, as `definition` returns them.
      cost: from B, T, H, HV, K, V, C, itemsize and backward to the cost, by the `cost` of its package.
      implementations: its implementations; the last one is chosen on a TPU.
      inputs: from a `chunkwise.shared.testing.Case` to the arguments.
      rounds: whether the results are in the type of the inputs; otherwise they are float32.
    """

    name: str
    run: Callable
    definition: Callable
    reads: tuple[str, ...]
    results: tuple[str, ...]
    cost: Callable[..., pl.CostEstimate]
    implementations: tuple[str, ...] = ("xla", "pallas")
    inputs: Callable[[cases.Case], dict] = cases.Case.arguments
    rounds: bool = False

    def by_name(self, results) -> dict:
        """Return the results of `run` or `definition` by name, without states that were not asked for."""
        results = results if isinstance(results, tuple) else (results,)
        return dict(zip(self.results, (y for y in results if y is not None), strict=True))


STAGES = (
    Stage(
        "chunk_local_cumsum",
        lambda x, C, **o: chunk_local_cumsum(x["g"], C, **o),
        lambda x, cu, C: exact.cumsum(x["g"], C, cu),
        ("g",),
        ("g_cum",),
        # The gates are float32, one for every value head.
        lambda *, H, HV, K, V, itemsize, **sizes: cumsum_cost(H=HV, **sizes),
    ),
    Stage(
        "chunk_scaled_dot_kkt",
        lambda x, C, **o: chunk_scaled_dot_kkt(x["k"], x["beta"], x["g_cum"], chunk_size=C, **o),
        lambda x, cu, C: exact.kkt(x["k"], x["beta"], x["g_cum"], C, cu),
        ("k", "beta", "g_cum"),
        ("A",),
        lambda *, V, **sizes: kkt_cost(**sizes),
    ),
    Stage(
        "solve_tril",
        lambda x, C, **o: solve_tril(x["A"], **o),
        lambda x, cu, C: exact.inverse(x["A"], cu),
        ("A",),
        ("A_inv",),
        lambda *, H, K, V, itemsize, **sizes: solve_tril_cost(**sizes),
    ),
    Stage(
        "recompute_w_u",
        lambda x, C, **o: recompute_w_u(x["k"], x["v"], x["beta"], x["A_inv"], x["g_cum"], **o),
        lambda x, cu, C: exact.w_u(x["k"], x["v"], x["beta"], x["A_inv"], x["g_cum"], cu),
        ("k", "v", "beta", "A_inv", "g_cum"),
        ("w", "u"),
        wy_fast_cost,
    ),
    Stage(
        "chunk_gated_delta_rule_fwd_h",
        lambda x, C, **o: chunk_gated_delta_rule_fwd_h(
            x["k"], x["w"], x["u"], x["g_cum"], x["initial_state"], True, chunk_size=C, **o
        ),
        lambda x, cu, C: exact.states(x["k"], x["w"], x["u"], x["g_cum"], x["initial_state"], C, cu),
        ("k", "w", "u", "g_cum", "initial_state"),
        ("h", "v_new", "final_state"),
        chunk_h_cost,
    ),
    Stage(
        "chunk_fwd_h",
        lambda x, C, **o: chunk_fwd_h(
            x["k"], x["v"], x["g_cum"], initial_state=x["initial_state"], output_final_state=True, chunk_size=C, **o
        ),
        lambda x, cu, C: exact.states(x["k"], None, x["v"], x["g_cum"], x["initial_state"], C, cu)[::2],
        ("k", "v", "g_cum", "initial_state"),
        ("h", "final_state"),
        functools.partial(chunk_h_cost, delta_rule=False),
    ),
    Stage(
        "chunk_fwd_o",
        lambda x, C, **o: chunk_fwd_o(x["q"], x["k"], x["v_new"], x["h"], x["g_cum"], chunk_size=C, **o),
        lambda x, cu, C: exact.output(x["q"], x["k"], x["v_new"], x["h"], x["g_cum"], None, C, cu),
        ("q", "k", "v_new", "h", "g_cum"),
        ("o",),
        chunk_o_cost,
        rounds=True,
    ),
)

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
        "causal_conv1d",
        lambda x, C, **o: causal_conv1d(
            x["x"], x["weight"], x["bias"], x["initial_state"], True, activation="silu", **o
        ),
        lambda x, cu, C: conv_norm_oracle.causal_conv1d(
            x["x"], x["weight"], x["bias"], x["initial_state"], name="silu", cu_seqlens=cu
        ),
        ("x", "weight", "bias", "initial_state"),
        ("y", "final_state"),
        lambda *, H, HV, K, V, C, **sizes: causal_conv1d_cost(D=2 * H * K + HV * V, W=_WIDTH, **sizes),
        inputs=_convolution_inputs,
        rounds=True,
    ),
    Stage(
        "rms_norm_gated",
        lambda x, C, cu_seqlens, **o: rms_norm_gated(x["x"], x["z"], x["weight"], **o),
        lambda x, cu, C: conv_norm_oracle.rms_norm_gated(x["x"], x["z"], x["weight"]),
        ("x", "z", "weight"),
        ("y",),
        lambda *, B, T, H, HV, K, V, C, **sizes: norm_gated_cost(rows=B * T * HV, D=V, **sizes),
        inputs=_norm_inputs,
        rounds=True,
    ),
)
