"""States, new values and final states against their definition in float64."""

import jax.numpy as jnp
import numpy as np
import pytest

from chunkwise.chunk_h import chunk_fwd_h, chunk_gated_delta_rule_fwd_h
from chunkwise.shared.testing import stage_oracle
from chunkwise.shared.testing.cases import CASES, Case
from chunkwise.shared.testing.compare import STAGE_TOLERANCE, assert_close

both = pytest.mark.parametrize("implementation", ["xla", "pallas"])


@both
@pytest.mark.parametrize("case", CASES, ids=str)
def test_delta_rule(case, implementation):
    x = case.arguments()
    k, w, u, g_cum, start = (x[name] for name in ("k", "w", "u", "g_cum", "initial_state"))
    cut = dict(cu_seqlens=case.cu_seqlens, chunk_size=case.chunk_size)
    h, v_new, final = chunk_gated_delta_rule_fwd_h(k, w, u, g_cum, start, True, **cut, implementation=implementation)
    assert h.dtype == v_new.dtype == final.dtype == jnp.float32
    expected_h, expected_v, expected_final = stage_oracle.states(k, w, u, g_cum, start, **cut)
    assert_close("h", h, expected_h, STAGE_TOLERANCE)
    case.assert_close("v_new", v_new, expected_v, STAGE_TOLERANCE)
    assert_close("final_state", final, expected_final, STAGE_TOLERANCE)
    if case.lengths is not None:
        used = sum(-(-length // case.chunk_size) for length in case.lengths)
        assert h.shape[1] == case.T // case.chunk_size + len(case.lengths)
        assert not np.asarray(h)[:, used:].any(), "unused chunks must be zero"
        empty = np.asarray(case.lengths) == 0
        np.testing.assert_array_equal(np.asarray(final)[empty], np.asarray(start)[empty])


def gates(kind, x, case, cut):
    """Return the keyword arguments of one kind of gate, and the cumulative gates that they stand for."""
    gamma = (
        -jnp.linspace(0.1, 30.0, case.HV) if kind == "strong_gamma" else jnp.log(1 - 2.0 ** -jnp.arange(5, 5 + case.HV))
    )
    constant = stage_oracle.cumsum(np.broadcast_to(gamma, x["g"].shape), **cut)
    channels = -np.abs(np.random.default_rng(3).standard_normal((*x["g"].shape, case.K))) * 3
    channels = stage_oracle.cumsum(channels, **cut).astype(np.float32)
    match kind:
        case "none":
            return {}, 0.0 * constant
        case "g_cum":
            return dict(g_cum=x["g_cum"]), x["g_cum"]
        case "both":
            return dict(g_cum=x["g_cum"], g_gamma=gamma), np.asarray(x["g_cum"], np.float64) + constant
        case "channels":
            return dict(gk_cum=jnp.asarray(channels)), channels
    return dict(g_gamma=gamma), constant


@both
@pytest.mark.parametrize("kind", ["none", "g_cum", "retention", "strong_gamma", "both", "channels"])
@pytest.mark.parametrize("case", [
    Case(B=2, T=37, H=1, HV=2, K=60, V=20, chunk_size=16, repeats=True),
    Case(T=40, H=2, HV=2, K=8, V=100, chunk_size=32, dtype="bfloat16", lengths=(0, 1, 33, 0, 3)),
], ids=str)  # fmt: skip
def test_linear_attention(case, kind, implementation):
    x = case.arguments()
    cut = dict(chunk_size=case.chunk_size, cu_seqlens=case.cu_seqlens)
    given, g_cum = gates(kind, x, case, cut)
    k, v, start = x["k"], x["v"], x["initial_state"]
    h, final = chunk_fwd_h(k, v, **given, initial_state=start, output_final_state=True, **cut,
                           implementation=implementation)  # fmt: skip
    expected_h, _, expected_final = stage_oracle.states(k, None, v, g_cum, start, **cut)
    assert_close("h", h, expected_h, STAGE_TOLERANCE)
    assert_close("final_state", final, expected_final, STAGE_TOLERANCE)


@both
def test_without_states(implementation):
    case = Case(B=2, T=20, K=8, V=4, chunk_size=16)
    x = case.arguments()
    args = [x[name] for name in ("k", "w", "u", "g_cum")]
    h, v_new, final = chunk_gated_delta_rule_fwd_h(*args, chunk_size=16, implementation=implementation)
    expected_h, expected_v, _ = stage_oracle.states(*args, chunk_size=16)
    assert final is None
    assert_close("h", h, expected_h, STAGE_TOLERANCE)
    assert_close("v_new", v_new, expected_v, STAGE_TOLERANCE)
    assert chunk_fwd_h(x["k"], x["v"], chunk_size=16, implementation=implementation)[1] is None
