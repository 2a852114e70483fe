"""Erase keys that read the state before the decay of their token, gates per head and per channel, against float64."""

import jax.numpy as jnp
import numpy as np
import pytest

from chunkwise.shared.testing import inputs
from chunkwise.shared.testing.compare import assert_close
from chunkwise.two_keys import chunk_comba, recurrent_comba
from tests.before_decay_suite import FORMS, GATES, assert_values_and_gradients

CALLS = [("chunk", form) for form in FORMS] + [("recurrent", form) for form in ("rows", "sequences")]
# Plain JAX takes segments by gates and erase keys of zeros.
QUICK = ("fused", "stream"), ("xla", "segments")
REST = ("chunk", True, "resets", jnp.float32)
# Comba has the cases of gates per head.
THOROUGH = dict(
    test_values_and_gradients=lambda implementation, call, form, per_channel, gate, dtype: (
        (implementation, form) not in QUICK or (call, per_channel, gate, dtype) != REST
    )
)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("per_channel", [False, True])
@pytest.mark.parametrize(("call", "form"), CALLS)
@pytest.mark.parametrize("implementation", ["xla", "fused"])
def test_values_and_gradients(implementation, call, form, per_channel, gate, dtype):
    assert_values_and_gradients(implementation, call, form, per_channel, gate, dtype)


def test_comba_of_flash_linear_attention():
    """The recurrence of its kernels, restated in float64: the erased value is read before the decay and before beta."""
    x = inputs.make_inputs(1, 40, 1, 2, 8, 12, erase="key", gate="resets", num_states=1)
    q, k, p, v, g, beta, S = (
        np.asarray(x[name][0], np.float64) for name in ("q", "k", "p", "v", "g", "beta", "initial_state")
    )
    want = np.empty(v.shape)
    for t in range(len(q)):
        written = beta[t][:, None] * (v[t] - np.einsum("hkv,k->hv", S, p[t, 0]))
        S = np.exp(g[t])[:, None, None] * S + k[t, 0][None, :, None] * written[:, None]
        want[t] = 8**-0.5 * np.einsum("hkv,k->hv", S, q[t, 0])
    for function in (chunk_comba, recurrent_comba):
        o, state = function(**x, output_final_state=True)
        assert_close("o", o[0], want, 1e-5)
        assert_close("final_state", state[0], S, 1e-5)
