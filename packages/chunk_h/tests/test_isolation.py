"""What is not finite in one sequence leaves every bit of the others, and padding may hold anything."""

import jax.numpy as jnp
import pytest

from chunkwise.chunk_h import chunk_fwd_h, chunk_gated_delta_rule_fwd_h
from chunkwise.shared.testing.cases import ISOLATION_CASES
from chunkwise.shared.testing.poison import assert_isolated


@pytest.mark.parametrize(
    ("gates", "implementation"),
    [
        ("g_cum", "xla"),
        ("g_cum", "pallas"),
        ("gk_cum", "pallas"),
        pytest.param("gk_cum", "xla", marks=pytest.mark.thorough),
    ],
)
@pytest.mark.parametrize("case", ISOLATION_CASES, ids=str)
def test_delta_rule(case, gates, implementation):
    names = ["k", "w", "u", gates, "initial_state"]

    def run(x, cu_seqlens):
        results = chunk_gated_delta_rule_fwd_h(
            *(x[name] for name in names), True, cu_seqlens, 16, implementation=implementation
        )
        return dict(zip(("h", "v_new", "final_state"), results, strict=True))

    assert_isolated(run, case.finite_arguments(*names), case.cu_seqlens, chunk_size=16)


@pytest.mark.parametrize("implementation", ["xla", "pallas"])
@pytest.mark.parametrize("case", ISOLATION_CASES, ids=str)
def test_linear_attention_without_states(case, implementation):
    def run(x, cu_seqlens):
        options = dict(cu_seqlens=cu_seqlens, chunk_size=16, implementation=implementation)
        return dict(h=chunk_fwd_h(x["k"], x["v"], x["g_cum"], x["g_gamma"], **options)[0])

    x = case.finite_arguments("k", "v", "g_cum") | dict(g_gamma=jnp.array([-0.1, -2.0]))
    # A sequence of one chunk has no state but the zeros before it, so nothing of it is seen.
    assert_isolated(run, x, case.cu_seqlens, chunk_size=16, shared=["g_gamma"], visible=False)
