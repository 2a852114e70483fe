"""What is not finite in one sequence must not change one bit of another, nor of another row of a batch."""

import functools

import jax.numpy as jnp
import pytest

from tests.either_two_keys import KINDS
from tests.poison import assert_operator_isolated

THOROUGH = dict(
    # The gated delta rule, whose grid steps keep sequences apart in the same way, has a quick case.
    test_isolated=True,
)


@pytest.mark.parametrize("implementation", ["xla", "fused"])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("of", ["rows with states", "sequences with states", "sequences"])
@pytest.mark.parametrize("kind", KINDS)
def test_isolated(kind, of, dtype, implementation):
    make = functools.partial(KINDS[kind].inputs, H=1, HV=2, K=16, V=8, dtype=dtype)
    assert_operator_isolated(KINDS[kind].chunk, make, of, (3, 0, 4, 30, 13), implementation=implementation)
