"""The mixer of a decode, whose kernel makes the copies of slots itself, against float64."""

import jax.numpy as jnp
import pytest

from chunkwise.shared.serving import mixer_kernel
from chunkwise.shared.testing.compare import TOLERANCE, assert_close
from shared.tests import mixer_suite

CASES = {"gated_delta_rule": dict(H=1, HV=2, pool=jnp.bfloat16), "kda": dict(H=1, HV=1, per_channel=True)}
THOROUGH = dict(test_decodes=lambda case: case != "gated_delta_rule")


@pytest.mark.parametrize("case", CASES)
def test_decodes(case, monkeypatch):
    # Two sequences a grid step: so buffers are used again.
    monkeypatch.setattr(mixer_kernel, "_STATES", 2 * CASES[case]["HV"])
    mixer, conv, states = mixer_suite.make(**CASES[case])
    o, _, after = mixer_suite.decode(mixer, conv, states)
    want_o, _, want = mixer_suite.reference(mixer, conv, states)
    assert_close("o", o, want_o, TOLERANCE["float32"])
    assert_close("states", after, want, TOLERANCE[states.dtype.name])
