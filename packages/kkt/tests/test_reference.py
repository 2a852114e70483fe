"""A against its definition in float64."""

import jax.numpy as jnp
import pytest

from chunkwise.kkt import chunk_scaled_dot_kkt
from chunkwise.shared.testing import stage_oracle
from chunkwise.shared.testing.cases import CASES, Case

both = pytest.mark.parametrize("implementation", ["xla", "pallas"])


@both
@pytest.mark.parametrize("case", CASES, ids=str)
def test_definition(case, implementation):
    x = case.arguments()
    cut = dict(chunk_size=case.chunk_size, cu_seqlens=case.cu_seqlens)
    A = chunk_scaled_dot_kkt(x["k"], x["beta"], x["g_cum"], **cut, implementation=implementation)
    assert A.dtype == jnp.float32
    case.assert_close("A", A, stage_oracle.kkt(x["k"], x["beta"], x["g_cum"], **cut))


@both
def test_strong_gates_per_channel(implementation):
    case = Case(T=40, H=1, HV=2, K=6, chunk_size=16, lengths=(3, 0, 33))
    x, g_cum, cut = case.arguments(), case.channel_gates(), dict(chunk_size=16, cu_seqlens=case.cu_seqlens)
    A = chunk_scaled_dot_kkt(x["k"], x["beta"], g_cum, **cut, implementation=implementation)
    case.assert_close("A", A, stage_oracle.kkt(x["k"], x["beta"], g_cum, **cut))


@both
def test_without_gate(implementation):
    case = Case(T=20, HV=2, K=8, chunk_size=16)
    x = case.arguments()
    A = chunk_scaled_dot_kkt(x["k"], x["beta"], chunk_size=16, implementation=implementation)
    case.assert_close("A", A, stage_oracle.kkt(x["k"], x["beta"], jnp.zeros_like(x["beta"]), 16))
