"""Linear attention with every kind of gate, and calls without states: values, gradients and isolation."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from chunkwise.chunk_h import chunk_fwd_h, chunk_gated_delta_rule_fwd_h
from chunkwise.shared.testing import stage_oracle
from chunkwise.shared.testing.cases import Case
from chunkwise.shared.testing.compare import GRADIENT_TOLERANCE, STAGE_TOLERANCE, assert_close
from chunkwise.shared.testing.inputs import boundaries
from chunkwise.shared.testing.oracle import reference
from tests.poison import assert_isolated
from tests.stage_cases import ISOLATION_CASES

THOROUGH = dict(
    test_linear_attention=lambda kind, case, implementation: (
        kind != "both" if implementation == "xla" else bool(case.lengths) and kind not in ("both", "channels")
    ),
    test_gradients_of_strong_constant_gates=lambda kind, implementation: (
        (kind == "head") != (implementation == "pallas")
    ),
    test_linear_attention_without_states=lambda implementation: implementation == "xla",
)


both = pytest.mark.parametrize("implementation", ["xla", "pallas"])


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


@both
@pytest.mark.parametrize("kind", ["head", "channel"])
def test_gradients_of_strong_constant_gates(kind, implementation):
    """Each head by itself, and a tail: the key at the end is not decayed, and is e^30 times what depends on gates."""
    lengths, gamma = (21, 0, 16), jnp.array([-1.0, -5.0, -30.0])
    cut = dict(cu_seqlens=boundaries(*lengths))
    x = Case(T=40, H=3, HV=3, K=4, V=2, chunk_size=16, lengths=lengths).arguments()
    k, v, start = x["k"], x["v"], x["initial_state"]
    dht = np.random.default_rng(1).standard_normal(start.shape)

    def loss(gamma):
        gates = dict(g_gamma=gamma)
        if kind == "channel":
            local = jnp.asarray(stage_oracle.cumsum(np.ones((1, 40, 3, 4)), chunk_size=16, **cut), jnp.float32)
            gates = dict(gk_cum=gamma[:, None] * local)
        return jnp.sum(dht * chunk_fwd_h(k, v, **gates, initial_state=start, output_final_state=True, chunk_size=16,
                                         implementation=implementation, **cut)[1])  # fmt: skip

    k, v = (jnp.nan_to_num(y) for y in (k, v))
    want = reference(k, k, v, g_gamma=gamma, initial_state=start, **cut, do=np.zeros(v.shape), dht=dht)[2]["g_gamma"]
    got = jax.jit(jax.grad(loss))(gamma)
    for head, strength in enumerate(gamma):
        assert_close(f"dg_gamma at {strength}", got[head], want[head], GRADIENT_TOLERANCE["float32"])


@both
@pytest.mark.parametrize("case", ISOLATION_CASES, ids=str)
def test_linear_attention_without_states(case, implementation):
    def run(x, cu_seqlens):
        options = dict(cu_seqlens=cu_seqlens, chunk_size=16, implementation=implementation)
        return dict(h=chunk_fwd_h(x["k"], x["v"], x["g_cum"], x["g_gamma"], **options)[0])

    x = case.finite_arguments("k", "v", "g_cum") | dict(g_gamma=jnp.array([-0.1, -2.0]))
    # A sequence of one chunk has no state but the zeros before it, so nothing of it is seen.
    assert_isolated(run, x, case.cu_seqlens, chunk_size=16, shared=["g_gamma"], visible=False)
