"""The tile mathematics by itself, and how the kernel is launched."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from chunkwise.shared.kernels.inverse import unit_lower_inverse
from chunkwise.shared.testing import stage_oracle
from chunkwise.shared.testing.cases import Case
from chunkwise.shared.testing.compare import error
from chunkwise.shared.testing.inputs import make_inputs
from chunkwise.shared.testing.transforms import text_for_tpu
from chunkwise.solve_tril import Config, solve_tril
from chunkwise.solve_tril.tile import solve_tile

pytestmark = pytest.mark.interpreted
# Compiled once for every size. Operands of 16 bits are three passes of a matrix unit where full precision takes six.
AT_FULL_PRECISION, AT_16_BITS = jax.jit(solve_tile), jax.jit(lambda A: unit_lower_inverse(A, 2))


def repeated_keys(C, beta):
    """Return A [1, C, C] of a chunk of one token, with noise of 1e-3 on the keys, and its inverse."""
    x = make_inputs(T=C, K=64, gate="zero", repeat_key=True, beta=beta, seed=1)
    noise = make_inputs(T=C, K=64, seed=2)["k"]
    A = jnp.asarray(stage_oracle.kkt(x["k"] + 1e-3 * noise, x["beta"], x["g"], C), jnp.float32)[:, :, 0]
    return A, np.linalg.inv(np.eye(C) + np.asarray(A, np.float64))


@pytest.mark.parametrize("beta", [1.0, 1.9])
@pytest.mark.parametrize("size", [pytest.param(64, marks=pytest.mark.thorough), 128])
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


@pytest.mark.parametrize("matrices", [1, 2, 3, 6])
def test_every_config_gives_the_same_bits(matrices):
    A = Case(T=20, H=1, HV=3, K=16, chunk_size=16).arguments()["A"]
    run = functools.partial(solve_tril, A, implementation="pallas")
    np.testing.assert_array_equal(run(), run(config=Config(matrices)))


def test_name():
    text = text_for_tpu(functools.partial(solve_tril, implementation="pallas"), jnp.zeros((1, 64, 1, 64)))
    assert "solve_tril_fwd_c64" in text
