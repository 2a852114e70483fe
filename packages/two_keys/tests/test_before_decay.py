"""Erase keys that read the state before the decay of their token, gates per head and per channel, against float64."""

import jax.numpy as jnp
import pytest

from tests.before_decay_suite import FORMS, GATES, assert_values_and_gradients

CALLS = [("chunk", form) for form in FORMS] + [("recurrent", form) for form in ("rows", "sequences")]
# Comba has the cases of gates per head.
THOROUGH = dict(
    test_values_and_gradients=lambda implementation, call, form, per_channel, gate, dtype: (
        (call, form, per_channel, gate, dtype) != ("chunk", "stream", True, "resets", jnp.float32)
    )
)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("per_channel", [False, True])
@pytest.mark.parametrize(("call", "form"), CALLS)
@pytest.mark.parametrize("implementation", ["xla", "fused"])
def test_values_and_gradients(implementation, call, form, per_channel, gate, dtype):
    assert_values_and_gradients(implementation, call, form, per_channel, gate, dtype)
