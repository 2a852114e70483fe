"""The checks that the tests of all stages make: each finds what is wrong, and names it."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from chunkwise.shared.testing.cases import Case
from tests import stage_suite as stages

PACKED = Case(T=20, HV=2, K=3, V=2, chunk_size=16, gate="strong", lengths=(1, 0, 17))


def double(g, cu_seqlens=None, *, implementation=None, wrong=""):
    """Return twice the gates of tokens in sequences, or something that is wrong in one way."""
    valid = jnp.arange(20)[:, None] < cu_seqlens[-1]
    out = jnp.where(valid, 2.0 * g, 1.0 if wrong == "padding" else 0.0)
    out = out * 1.001 if wrong == "value" else out
    # The last sequence begins at token 1.
    out = out.at[:, 0].add(g[:, 1]) if wrong == "leak" else out
    return out.astype(jnp.float16 if wrong == "type" else jnp.float32)


def define(g, cu_seqlens):
    return 2.0 * np.where(np.arange(20)[:, None] < cu_seqlens[-1], np.asarray(g, np.float64), 0.0)


def spec(wrong=""):
    return stages.StageSpec(double, ("g",), ("g_doubled",), define, options=dict(wrong=wrong))


def assert_defined(stage):
    stages.assert_defined(stage, PACKED, "xla", stage.arrays(PACKED))


def test_a_right_stage_passes():
    assert_defined(spec())
    stages.assert_gradients(spec(), PACKED, "xla")
    stages.assert_isolated(spec(), PACKED, "xla")


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ("value", r"g_doubled: error 1.0\d*e-03 > 1.0e-06"),
        ("padding", "g_doubled: padding must be zero"),
        ("type", "g_doubled is float16"),
    ],
)
def test_wrong_results(wrong, message):
    with pytest.raises(AssertionError, match=message):
        assert_defined(spec(wrong))


def test_wrong_gradients():
    with pytest.raises(AssertionError, match="dg: error"):
        stages.assert_gradients(spec("value"), PACKED, "xla")


def test_a_leak():
    with pytest.raises(AssertionError, match="NaN in the input g of sequence 2 changed g_doubled of others"):
        stages.assert_isolated(spec("leak"), PACKED, "xla")


def test_names_of_launches():
    named = dataclasses.replace(spec(), launches=("double_c{}", "double_c{}_reverse"))
    assert [spec().launch(64, backward) for backward in (False, True)] == ["double_fwd_c64", "double_bwd_c64"]
    assert [named.launch(64, backward) for backward in (False, True)] == ["double_c64", "double_c64_reverse"]
