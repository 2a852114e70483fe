"""The decodes of a layer, whose kernel makes the copies of slots itself, against float64."""

import jax.numpy as jnp
import pytest

from chunkwise.shared.serving.decode import launch
from chunkwise.shared.testing.compare import assert_close
from tests import decode_suite, rule_suite

CASES = {
    "gated_delta_rule": dict(H=1, HV=2, pool=jnp.bfloat16),
    "kda": dict(H=1, HV=1, per_channel=True),
    "ring": dict(H=2, HV=2, pool=jnp.bfloat16, ring=True),
    "drafts": dict(H=2, HV=2, pool=jnp.bfloat16, ring=True, tokens=2),
    "slots": dict(H=1, HV=2, pool=jnp.bfloat16, tokens=2),
    "kda_int8_ring": dict(H=2, HV=2, per_channel=True, pool=jnp.int8, ring=True),
}
# Rings of int8, and drafts, are the kernel with all that it has.
THOROUGH = dict(
    test_decodes=lambda case: case != "slots",
    test_erase_keys_and_narrow_heads=lambda case: (
        case not in ("half a register", "RWKV-7", "nine drafts, one after the other")
    ),
)


@pytest.mark.parametrize("case", CASES)
def test_decodes(case, monkeypatch):
    # Two sequences a grid step: so buffers are used again.
    monkeypatch.setattr(launch, "_STATES", 2 * CASES[case]["HV"])
    decodes, conv, pool = decode_suite.make(**CASES[case])
    o, _, after = decode_suite.decode(decodes, conv, pool)
    want_o, _, want = decode_suite.reference(decodes, conv, decode_suite.states_before(decodes, pool))
    kind = pool.states.dtype.name
    assert_close("o", o, want_o, decode_suite.LIMITS[kind if pool.replay else "float32"])
    assert_close("states", decode_suite.states_after(decodes, after), want, decode_suite.LIMITS[kind])


@pytest.mark.parametrize(
    "case",
    [
        "comba, drafts in slots",
        "gdn2, ring",
        "half a register",
        "Mamba-2",
        "RWKV-7",
        "nine drafts, one after the other",
    ],
)
def test_erase_keys_and_narrow_heads(case, monkeypatch):
    # One sequence a grid step: so buffers are used again.
    monkeypatch.setattr(launch, "_STATES", rule_suite.HV)
    rule_suite.assert_decodes(case)
