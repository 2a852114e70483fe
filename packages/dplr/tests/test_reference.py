"""The delta rule with diagonal plus low-rank transitions against its definition in float64, and as RWKV-7."""

import re

import jax
import jax.numpy as jnp
import pytest

from chunkwise.dplr import (
    chunk_dplr_delta_rule,
    chunk_rwkv7,
    ragged_dplr_delta_rule,
    recurrent_dplr_delta_rule,
    recurrent_rwkv7,
)
from chunkwise.shared.testing import definitions
from chunkwise.shared.testing.compare import assert_close
from chunkwise.shared.testing.inputs import make_dplr_inputs
from tests.composition_suite import CompositionTests, Kind, assert_values_and_gradients

KIND = Kind(
    chunk_dplr_delta_rule, recurrent_dplr_delta_rule, ragged_dplr_delta_rule, definitions.DPLR_DELTA_RULE,
    make_dplr_inputs, ("gk",),
)  # fmt: skip
NAMES = {"q": "r", "gk": "w"}


class TestDplr(CompositionTests):
    kind = raw = KIND
    per_channel = True


def test_one_key_for_all_tokens():
    assert_values_and_gradients(KIND, "chunk", "sequences", "xla", gate="zero", repeat_key=True)


@pytest.mark.parametrize("call", ["chunk", "recurrent"])
def test_rwkv7(call):
    """It has other names, another order and a scale of 1; a promise about its decays changes nothing."""
    renamed = lambda *args, **options: {
        NAMES.get(name, name): y for name, y in make_dplr_inputs(*args, **options).items()
    }
    functions = dict(chunk=chunk_rwkv7, recurrent=recurrent_rwkv7)
    static = dict(min_gate=-0.61) if call == "chunk" else {}
    kind = KIND._replace(**functions, inputs=renamed, gates=("w",), names=NAMES, scale=1.0, static=static)
    assert_values_and_gradients(kind, call, "rows", "xla", gate="logsigmoid/10")


def test_two_types_of_keys():
    """Keys that are written with b and with k may have two types; nothing is promoted in silence."""
    x = make_dplr_inputs(1, 20, 1, 2, 8, 8)
    for name in "bk":
        mixed = x | {name: x[name].astype(jnp.bfloat16)}
        with jax.numpy_dtype_promotion("strict"):
            o = chunk_dplr_delta_rule(**mixed)[0]
        assert_close("o", o, chunk_dplr_delta_rule(**mixed | {name: mixed[name].astype(jnp.float32)})[0], 1e-6)


@pytest.mark.parametrize(("name", "label"), [("r", "B, T, H, K"), ("w", "B, T, HV, K")])
def test_errors_of_rwkv7_have_its_names(name, label):
    x = {NAMES.get(each, each): y for each, y in make_dplr_inputs(1, 4, 1, 2, 8, 8).items()}
    with pytest.raises(ValueError, match=re.escape(f"`{name}` must have shape [{label}]; got (1, 4).")):
        chunk_rwkv7(**x | {name: jnp.zeros((1, 4))})
