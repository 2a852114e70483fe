"""The tile mathematics by itself, tile sizes and cost."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from chunkwise.shared.kernels.inverse import unit_lower_inverse
from chunkwise.shared.testing import stage_oracle
from chunkwise.shared.testing.compare import error
from chunkwise.shared.testing.inputs import make_inputs
from chunkwise.solve_tril.config import cost
from chunkwise.solve_tril.tile import solve_tile

THOROUGH = dict(test_full_precision_is_needed_and_suffices=lambda size: size == 128)
# Compiled once for every size. Operands of 16 bits are three passes of a matrix unit where full precision takes six.
AT_FULL_PRECISION, AT_16_BITS = jax.jit(solve_tile), jax.jit(lambda A: unit_lower_inverse(A, 2))


def repeated_keys(C, beta):
    """Return A [1, C, C] of a chunk of one token, with noise of 1e-3 on the keys, and its inverse."""
    x = make_inputs(T=C, K=64, gate="zero", repeat_key=True, beta=beta, seed=1)
    noise = make_inputs(T=C, K=64, seed=2)["k"]
    A = jnp.asarray(stage_oracle.kkt(x["k"] + 1e-3 * noise, x["beta"], x["g"], C), jnp.float32)[:, :, 0]
    return A, np.linalg.inv(np.eye(C) + np.asarray(A, np.float64))


@pytest.mark.parametrize("beta", [1.0, 1.9])
@pytest.mark.parametrize("size", [64, 128])
def test_full_precision_is_needed_and_suffices(size, beta):
    A, expected = repeated_keys(size, beta)
    full = error(AT_FULL_PRECISION(A), expected)
    assert full < (1e-6 if beta == 1.0 else 5e-6)
    assert error(AT_16_BITS(A), expected) > 20 * full


def test_powers_would_not_do():
    # (I - A)(I + A^2)(I + A^4)... is the inverse too, in exact arithmetic.
    A, expected = repeated_keys(64, 1.0)
    A = np.asarray(A[0], np.float32)
    X, power = np.eye(64, dtype=np.float32) - A, A
    for _ in range(5):
        power = power @ power
        X = X + X @ power
    assert error(X[None], expected) > 1.0


@pytest.mark.parametrize("C", [16, 64, 128])
def test_flops_are_those_of_the_algorithm(C):
    # Substitution inside of blocks of 16 rows, then two products for every pair of neighbours.
    joins = [b for b in (16, 32, 64) if b < C]
    matrix = C // 16 * 16**3 // 3 + sum(2 * 2 * b**3 * (C // (2 * b)) for b in joins)
    assert cost(B=1, T=C, HV=1, C=C).flops == pytest.approx(matrix, abs=16)
    assert cost(B=1, T=C, HV=1, C=C, backward=True).flops == 4 * C**3
