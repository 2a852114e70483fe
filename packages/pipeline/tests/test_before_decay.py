"""Erase keys that read the state before the decay of their token, by stages; `two_keys` has the other cases."""

import jax.numpy as jnp
import pytest

from chunkwise.pipeline import staged
from tests.before_decay_suite import FORMS, GATES, RECORD, assert_values_and_gradients

THOROUGH = dict(
    test_values_and_gradients=lambda form, per_channel, gate, dtype: (
        (form, per_channel, gate, dtype) != ("sequences", True, "resets", jnp.float32)
    )
)


@pytest.fixture(scope="module", autouse=True)
def _staged():
    staged.add_delta_rule(RECORD)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("per_channel", [False, True])
@pytest.mark.parametrize("form", FORMS)
def test_values_and_gradients(form, per_channel, gate, dtype):
    assert_values_and_gradients("staged", "chunk", form, per_channel, gate, dtype)
