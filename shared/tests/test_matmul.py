"""Operand types and precision of products."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from chunkwise.shared.kernels.matmul import dot, dot_nt, dot_tn, emulate_mxu
from chunkwise.shared.testing.compare import assert_close, error


def pair(dtype=jnp.float32):
    rng = np.random.default_rng(0)
    return (jnp.asarray(rng.standard_normal((2, 32, 32)), dtype) for _ in range(2))


@pytest.mark.parametrize(
    ("product", "expected"),
    [(dot, lambda a, b: a @ b), (dot_nt, lambda a, b: a @ b.mT), (dot_tn, lambda a, b: a.mT @ b)],
)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_products(dtype, product, expected):
    a, b = pair(dtype)
    got = product(a, b)
    assert got.dtype == jnp.float32
    assert_close("product", got, expected(np.asarray(a, np.float64), np.asarray(b, np.float64)), 1e-6)


def test_one_bfloat16_operand_does_not_narrow_the_other():
    a, b = pair()
    exact = np.asarray(a.astype(jnp.bfloat16), np.float64) @ np.asarray(b, np.float64)
    assert_close("product", dot(a.astype(jnp.bfloat16), b), exact, 1e-6)
    assert error(dot(a, b, jnp.bfloat16), exact) > 1e-3


def test_emulated_passes():
    a, b = pair()
    exact = np.asarray(a, np.float64) @ np.asarray(b, np.float64)
    errors = []
    for passes in (1, 3):
        with emulate_mxu(passes):
            errors.append(error(dot(a, b), exact))
    assert 1e-3 < errors[0] < 1e-2
    assert 1e-6 < errors[1] < 1e-4
    assert error(dot(a, b), exact) < 1e-6


def test_bfloat16_operands_are_exact_under_emulation():
    a, b = pair(jnp.bfloat16)
    with emulate_mxu(1):
        emulated = dot(a, b)
    np.testing.assert_array_equal(emulated, dot(a, b))


def test_emulation_ends_with_an_exception_and_checks_its_argument():
    with pytest.raises(ValueError, match="`passes` must be 1 or 3; got 2"), emulate_mxu(2):
        pass
    with pytest.raises(RuntimeError), emulate_mxu(1):
        raise RuntimeError
    a, b = pair()
    assert error(dot(a, b), np.asarray(a, np.float64) @ np.asarray(b, np.float64)) < 1e-6


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_precision_is_stated_in_the_program(dtype):
    a, b = pair(jnp.float32 if dtype == "f32" else jnp.bfloat16)
    text = jax.jit(lambda a, b: dot(a, b)).lower(a, b).as_text()
    assert ("HIGHEST" in text) == (dtype == "f32")
