"""The tests that all stages have: of the delta rule, and of linear attention as far as it has kernels of its own."""

import jax.numpy as jnp
import numpy as np
import pytest

from chunkwise.chunk_h import Config, chunk_fwd_h, chunk_gated_delta_rule_fwd_h
from chunkwise.shared.testing import stage_oracle
from chunkwise.shared.testing.inputs import spec
from tests import stage_suite as stages

CONFIGS = tuple(Config(heads) for heads in (1, 2, 4, 8))
THOROUGH = dict(
    test_gradients_of_linear_attention=lambda gate, implementation: (gate, implementation) == ("gk_cum", "xla")
)


def define_linear(k, v, initial_state, g_cum=None, gk_cum=None, chunk_size=64):
    h, _, final_state = stage_oracle.states(k, None, v, gk_cum if g_cum is None else g_cum, initial_state, chunk_size)
    return h, final_state


def linear_spec(gate: str, suffix: str, wrong: tuple) -> stages.StageSpec:
    return stages.StageSpec(
        function=chunk_fwd_h,
        arguments=("k", "v", gate, "initial_state"),
        results=("h", "final_state"),
        definition=define_linear,
        # Any decreasing gates per channel will do.
        inputs=lambda case: (x := case.arguments()) | dict(gk_cum=x["g_cum"][..., None] * (1 + x["w"] ** 2)),
        options=dict(output_final_state=True),
        configs=CONFIGS,
        launches=(f"chunk_fwd_h_fwd_c{{}}{suffix}", f"chunk_fwd_h_bwd_c{{}}{suffix}"),
        tpu_sizes=((64, 256, False), (128, 128, False), (128, 128, True)),
        wrong=wrong,
    )


PER_HEAD = (
    (dict(v=spec(2, 64, 4)), "`v` must have shape [B, T, HV, V]; got (2, 64, 4)."),
    (dict(g_cum=spec(2, 64, 2)), "`g_cum` must have shape [B, T, HV] = (2, 64, 4); got (2, 64, 2)."),
    (dict(k=spec(2, 64, 3, 8)), "`v` must have a multiple of the heads of `k`; got 4 value heads for 3 key heads."),
    (dict(g_gamma=spec(2)), "`g_gamma` must have shape [HV] = (4); got (2,)."),
)
PER_CHANNEL = (
    (dict(gk_cum=spec(2, 64, 4)), "`gk_cum` must have shape [B, T, HV, K]; got (2, 64, 4)."),
    (dict(g_gamma=spec(4)), "`gk_cum` must come without `g_cum` and `g_gamma`; got both."),
)
LINEAR = dict(g_cum=linear_spec("g_cum", "", PER_HEAD), gk_cum=linear_spec("gk_cum", "_gk", PER_CHANNEL))


class TestDeltaRule(stages.StageTests, stages.GateTests, stages.ChunkSizeTests):
    stage = stages.StageSpec(
        function=chunk_gated_delta_rule_fwd_h,
        arguments=("k", "w", "u", "g_cum", "initial_state"),
        results=("h", "v_new", "final_state"),
        definition=stage_oracle.states,
        costs=(
            stages.CostSpec(dict(delta_rule=True), backward=2),
            stages.CostSpec(dict(delta_rule=False), backward=2, function=chunk_fwd_h),
        ),
        options=dict(output_final_state=True),
        gradient_sizes=(dict(HV=1), dict(HV=1, T=18, lengths=(1, 0, 17))),
        configs=CONFIGS,
        wrong=(
            (dict(u=spec(2, 64, 4)), "`u` must have shape [B, T, HV, V]; got (2, 64, 4)."),
            (dict(k=spec(2, 63, 2, 8)), "`k` must have shape [B, T, H, K] = (2, 64, any, any); got (2, 63, 2, 8)."),
            (dict(w=spec(2, 64, 2, 8)), "`w` must have shape [B, T, HV, K] = (2, 64, 4, 8); got (2, 64, 2, 8)."),
            (dict(g_cum=spec(2, 64, 2)), "`g_cum` must have shape [B, T, HV] = (2, 64, 4); got (2, 64, 2)."),
            (dict(k=spec(2, 64, 3, 8)), "`u` must have a multiple of the heads of `k`; got 4 value heads for 3"),
            (dict(output_final_state=jnp.ones(1)), "`output_final_state` must be True or False, known when the"),
            (dict(initial_state=spec(1, 4, 8, 6)),
             "`initial_state` must have shape [N, HV, K, V] = (2, 4, 8, 6); got (1, 4, 8, 6)."),
        ),
    )  # fmt: skip

    def check(self, case, x, results):
        if case.lengths is None:
            return
        h, lengths = np.asarray(results["h"]), np.asarray(case.lengths)
        assert h.shape[1] == case.T // case.chunk_size + len(lengths)
        assert not h[:, np.sum(-(-lengths // case.chunk_size)) :].any(), "unused chunks of h must be zero"
        kept, start = (np.asarray(y)[lengths == 0] for y in (results["final_state"], x["initial_state"]))
        np.testing.assert_array_equal(kept, start, "final_state of an empty sequence")


class TestLinearAttention(stages.ErrorTests, stages.KernelTests, stages.TpuTests):
    stage = LINEAR["g_cum"]


class TestLinearAttentionPerChannel(stages.ErrorTests, stages.KernelTests, stages.TpuTests):
    stage = LINEAR["gk_cum"]


@stages.both
@pytest.mark.parametrize("gate", LINEAR)
def test_gradients_of_linear_attention(gate, implementation):
    stages.assert_gradients(LINEAR[gate], stages.small(), implementation)
