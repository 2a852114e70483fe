"""The tile mathematics by itself, and how the kernel is launched."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from chunkwise.shared import emulate_mxu, stage_reference
from chunkwise.shared.testing import Case, error, make_inputs, text_for_tpu
from chunkwise.solve_tril import Config, solve_tril
from chunkwise.solve_tril.kernel import level_mask, solve_tile


def repeated_keys(C, beta):
    """Return A [1, C, C] of a chunk of one token, with noise of 1e-3 on the keys, and its inverse."""
    x = make_inputs(T=C, K=64, gate="zero", repeat_key=True, beta=beta, seed=1)
    noise = make_inputs(T=C, K=64, seed=2)["k"]
    A = jnp.asarray(stage_reference.kkt(x["k"] + 1e-3 * noise, x["beta"], x["g"], C), jnp.float32)[:, :, 0]
    return A, np.linalg.inv(np.eye(C) + np.asarray(A, np.float64))


@pytest.mark.parametrize("size", [16, 32, 64, 128])
def test_levels_tile_the_lower_triangle(size):
    levels = sum(level_mask(size, level).astype(jnp.int32) for level in range(size.bit_length() - 1))
    np.testing.assert_array_equal(levels[0], np.tril(np.ones((size, size)), -1))


@pytest.mark.parametrize("beta", [1.0, 1.9])
@pytest.mark.parametrize("size", [64, 128])
def test_full_precision_is_needed_and_suffices(size, beta):
    A, expected = repeated_keys(size, beta)
    full = error(solve_tile(A), expected)
    lost = {}
    for passes in (1, 3):
        with emulate_mxu(passes):
            lost[passes] = error(jax.jit(lambda A: solve_tile(A))(A), expected)
    assert full < (1e-6 if beta == 1.0 else 5e-6)
    # A bare product of float32 operands may be one bfloat16 pass on a TPU; three passes are not enough either.
    assert lost[1] > 1000 * full
    assert lost[3] > 20 * full


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
