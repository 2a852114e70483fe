"""The one table of the stages of the chain, as those see it that treat all stages alike: checks and benchmarks."""

from collections.abc import Callable
from dataclasses import dataclass

from chunkwise.chunk_h import chunk_fwd_h, chunk_gated_delta_rule_fwd_h
from chunkwise.chunk_o import chunk_fwd_o
from chunkwise.cumsum import chunk_local_cumsum
from chunkwise.kkt import chunk_scaled_dot_kkt
from chunkwise.shared.testing import stage_oracle as exact
from chunkwise.solve_tril import solve_tril
from chunkwise.wy_fast import recompute_w_u


@dataclass(frozen=True)
class Stage:
    """A stage of the chain: how to run it and its definition, both of the arguments of a Case by name.

    Attributes:
      name: its name in its package.
      run: of arguments x, further keywords of the stage, and the chunk size.
      definition: of arguments x, cu_seqlens and the chunk size, in float64.
      reads: the names of its arguments, as `chunkwise.shared.testing.Case` gives them.
      results: the names of its results, likewise.
      implementations: what it comes in; the last is the TPU's choice.
    """

    name: str
    run: Callable
    definition: Callable
    reads: tuple[str, ...]
    results: tuple[str, ...]
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
    ),
    Stage(
        "chunk_scaled_dot_kkt",
        lambda x, C, **o: chunk_scaled_dot_kkt(x["k"], x["beta"], x["g_cum"], chunk_size=C, **o),
        lambda x, cu, C: exact.kkt(x["k"], x["beta"], x["g_cum"], C, cu),
        ("k", "beta", "g_cum"),
        ("A",),
    ),
    Stage(
        "solve_tril",
        lambda x, C, **o: solve_tril(x["A"], **o),
        lambda x, cu, C: exact.inverse(x["A"], cu),
        ("A",),
        ("A_inv",),
    ),
    Stage(
        "recompute_w_u",
        lambda x, C, **o: recompute_w_u(x["k"], x["v"], x["beta"], x["A_inv"], x["g_cum"], **o),
        lambda x, cu, C: exact.w_u(x["k"], x["v"], x["beta"], x["A_inv"], x["g_cum"], cu),
        ("k", "v", "beta", "A_inv", "g_cum"),
        ("w", "u"),
    ),
    Stage(
        "chunk_gated_delta_rule_fwd_h",
        lambda x, C, **o: chunk_gated_delta_rule_fwd_h(
            x["k"], x["w"], x["u"], x["g_cum"], x["initial_state"], True, chunk_size=C, **o
        ),
        lambda x, cu, C: exact.states(x["k"], x["w"], x["u"], x["g_cum"], x["initial_state"], C, cu),
        ("k", "w", "u", "g_cum", "initial_state"),
        ("h", "v_new", "final_state"),
    ),
    Stage(
        "chunk_fwd_h",
        lambda x, C, **o: chunk_fwd_h(
            x["k"], x["v"], x["g_cum"], initial_state=x["initial_state"], output_final_state=True, chunk_size=C, **o
        ),
        lambda x, cu, C: exact.states(x["k"], None, x["v"], x["g_cum"], x["initial_state"], C, cu)[::2],
        ("k", "v", "g_cum", "initial_state"),
        ("h", "final_state"),
    ),
    Stage(
        "chunk_fwd_o",
        lambda x, C, **o: chunk_fwd_o(x["q"], x["k"], x["v_new"], x["h"], x["g_cum"], chunk_size=C, **o),
        lambda x, cu, C: exact.output(x["q"], x["k"], x["v_new"], x["h"], x["g_cum"], None, C, cu),
        ("q", "k", "v_new", "h", "g_cum"),
        ("o",),
    ),
)
