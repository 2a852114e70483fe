"""The inverse against the one in float64, where keys repeat and where entries are not read; a known inverse."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from chunkwise.shared.testing import stage_oracle
from chunkwise.shared.testing.cases import Case
from chunkwise.shared.testing.compare import STAGE_TOLERANCE, assert_close
from chunkwise.shared.testing.inputs import boundaries, make_inputs
from chunkwise.solve_tril import solve_tril

THOROUGH = dict(
    # The inverse of a larger chunk is made of those of smaller ones.
    test_one_key_for_all_tokens=lambda chunk_size, implementation: (
        chunk_size != (64 if implementation == "xla" else 128)
    ),
    test_known_inverse=lambda implementation: implementation == "xla",
    test_entries_on_and_above_the_diagonal_are_not_read=lambda chunk_size: chunk_size != 16,
)


both = pytest.mark.parametrize("implementation", ["xla", "pallas"])


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


@both
def test_known_inverse(implementation):
    """It is returned as it is, and the gradient is that of the inverse."""
    run = functools.partial(solve_tril, implementation=implementation, cu_seqlens=boundaries(1, 0, 17))
    A = Case(T=20, K=3, chunk_size=16).arguments()["A"]
    A_inv, pull = jax.vjp(run, A)
    known, pull_known = jax.vjp(lambda A, A_inv: run(A, A_inv=A_inv), A, A_inv)
    np.testing.assert_array_equal(known, A_inv)
    dA, dA_inv = pull_known(jnp.cos(A_inv))
    np.testing.assert_array_equal(dA, *pull(jnp.cos(A_inv)))
    assert not dA_inv.any(), "dA_inv is not zero"
