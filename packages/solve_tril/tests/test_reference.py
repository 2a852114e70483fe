"""The inverse against the one in float64."""

import jax.numpy as jnp
import pytest

from chunkwise.shared.testing import stage_oracle
from chunkwise.shared.testing.cases import CASES, Case
from chunkwise.shared.testing.compare import STAGE_TOLERANCE, assert_close
from chunkwise.shared.testing.inputs import make_inputs
from chunkwise.solve_tril import solve_tril

both = pytest.mark.parametrize("implementation", ["xla", "pallas"])


# To the inverse only the size of a chunk and the packing matter.
@both
@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=pytest.mark.thorough if case.repeats else []) for case in CASES], ids=str
)
def test_definition(case, implementation):
    A = case.arguments()["A"]
    A_inv = solve_tril(A, case.cu_seqlens, implementation=implementation)
    assert A_inv.dtype == jnp.float32
    case.assert_close("A_inv", A_inv, stage_oracle.inverse(A, case.cu_seqlens))


@both
@pytest.mark.parametrize("chunk_size", [16, 32, 64, 128])
@pytest.mark.parametrize("beta", [1.0, 1.9])
def test_one_key_for_all_tokens(beta, chunk_size, implementation):
    # The worst case of the delta rule, and what any repeated word comes close to.
    x = make_inputs(T=chunk_size, K=16, gate="zero", repeat_key=True, beta=beta)
    A = jnp.asarray(stage_oracle.kkt(x["k"], x["beta"], x["g"], chunk_size), jnp.float32)
    A_inv = solve_tril(A, implementation=implementation)
    # At beta = 1.9 the condition number is 3,000 and the rounding of the first products alone costs 2e-6.
    assert_close("A_inv", A_inv, stage_oracle.inverse(A), STAGE_TOLERANCE if beta == 1.0 else 5e-6)


@both
@pytest.mark.parametrize("chunk_size", [16, 128])
def test_entries_on_and_above_the_diagonal_are_not_read(chunk_size, implementation):
    case = Case(T=chunk_size + 3, K=8, chunk_size=chunk_size)
    A = case.arguments()["A"]
    position = jnp.arange(case.T) % chunk_size
    garbage = jnp.arange(chunk_size) >= position[:, None]
    dirty = jnp.where(garbage[None, :, None], jnp.nan, A)
    clean, got = (solve_tril(M, implementation=implementation) for M in (A, dirty))
    case.assert_close("A_inv", got, clean, 0.0)


@both
def test_narrow_types_are_widened(implementation):
    A = Case(T=20, K=8, chunk_size=16).arguments()["A"].astype(jnp.bfloat16)
    A_inv = solve_tril(A, implementation=implementation)
    assert_close("A_inv", A_inv, stage_oracle.inverse(A), STAGE_TOLERANCE)
