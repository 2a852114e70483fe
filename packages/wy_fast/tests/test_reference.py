"""w and u against their definition in float64."""

import jax.numpy as jnp
import pytest

from chunkwise.shared.testing import stage_oracle
from chunkwise.shared.testing.cases import CASES, Case
from chunkwise.wy_fast import recompute_w_u

both = pytest.mark.parametrize("implementation", ["xla", "pallas"])


@both
@pytest.mark.parametrize("case", CASES, ids=str)
def test_definition(case, implementation):
    x = case.arguments()
    args = [x[name] for name in ("k", "v", "beta", "A_inv", "g_cum")]
    w, u = recompute_w_u(*args, case.cu_seqlens, implementation=implementation)
    # Whatever the inputs are: u - w S cancels where keys repeat.
    assert w.dtype == u.dtype == jnp.float32
    for name, got, want in zip("wu", (w, u), stage_oracle.w_u(*args, case.cu_seqlens), strict=True):
        case.assert_close(name, got, want)


@both
def test_strong_gates_per_channel(implementation):
    case = Case(T=40, H=1, HV=2, K=6, V=4, chunk_size=16, lengths=(3, 0, 33))
    x = case.arguments()
    args = [*(x[name] for name in ("k", "v", "beta", "A_inv")), case.channel_gates(), case.cu_seqlens]
    got = recompute_w_u(*args, implementation=implementation)
    for name, y, want in zip("wu", got, stage_oracle.w_u(*args), strict=True):
        case.assert_close(name, y, want)


@both
def test_without_gate(implementation):
    case = Case(T=20, HV=2, K=8, V=4, chunk_size=16)
    x = case.arguments()
    args = [x[name] for name in ("k", "v", "beta", "A_inv")]
    got = recompute_w_u(*args, implementation=implementation)
    for name, y, want in zip("wu", got, stage_oracle.w_u(*args, jnp.zeros_like(x["g"])), strict=True):
        case.assert_close(name, y, want)
