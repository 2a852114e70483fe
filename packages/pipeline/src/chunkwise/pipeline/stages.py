"""The one table of the stages of the chain, as those see it that treat all stages alike: checks and benchmarks."""

import functools
from collections.abc import Callable
from dataclasses import dataclass

from jax.experimental import pallas as pl

from chunkwise.chunk_h import chunk_fwd_h, chunk_gated_delta_rule_fwd_h
from chunkwise.chunk_h.cost import cost as chunk_h_cost
from chunkwise.chunk_o import chunk_fwd_o
from chunkwise.chunk_o.cost import cost as chunk_o_cost
from chunkwise.cumsum import chunk_local_cumsum
from chunkwise.cumsum.cost import cost as cumsum_cost
from chunkwise.kkt import chunk_scaled_dot_kkt
from chunkwise.kkt.cost import cost as kkt_cost
from chunkwise.shared.testing import stage_oracle as exact
from chunkwise.solve_tril import solve_tril
from chunkwise.solve_tril.cost import cost as solve_tril_cost
from chunkwise.wy_fast import recompute_w_u
from chunkwise.wy_fast.cost import cost as wy_fast_cost


@dataclass(frozen=True)
class Stage:
    """A stage of the chain: how to run it and its definition, both of the arguments of a Case by name.

    Attributes:
      name: its name in its package.
      run: of arguments x, further keywords of the stage, and the chunk size.
      definition: of arguments x, cu_seqlens and the chunk size, in float64.
      reads: the names of its arguments, as `chunkwise.shared.testing.Case` gives them.
      results: the names of its results, likewise.
      cost: of the sizes B, T, H, HV, K, V, C, itemsize and backward: its package's `cost` of those that it takes.
      implementations: what it comes in; the last is the TPU's choice.
    """

    name: str
    run: Callable
    definition: Callable
    reads: tuple[str, ...]
    results: tuple[str, ...]
    cost: Callable[..., pl.CostEstimate]
    implementations: tuple[str, ...] = ("xla", "pallas")

    def by_name(self, results) -> dict:
        """Return what `run` or `definition` returned by name; without states that were not asked for."""
        results = results if isinstance(results, tuple) else (results,)
        return dict(zip(self.results, (y for y in results if y is not None), strict=True))


STAGES = (
    Stage(
        "chunk_local_cumsum",
        lambda x, C, **o: chunk_local_cumsum(x["g"], C, **o),
        lambda x, cu, C: exact.cumsum(x["g"], C, cu),
        ("g",),
        ("g_cum",),
        # The gates are float32, and every value head has its own.
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
    ),
)
