"""Rows of segments: values, gradients, isolation, and that there is one launch and one program for all ids."""

import jax.numpy as jnp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chunkwise.fused_gdn import chunk_gated_delta_rule
from chunkwise.shared.chips import CHIPS
from chunkwise.shared.testing import tpu
from chunkwise.shared.testing.inputs import make_inputs
from chunkwise.shared.testing.poison import assert_isolated
from chunkwise.shared.testing.segmented import (
    SEGMENT_IDS,
    assert_random_segments,
    assert_segments,
    compile_segments,
    over_segments,
    segment_launches,
)

FUSED, XLA = (over_segments(chunk_gated_delta_rule, x) for x in ("fused", "xla"))
THOROUGH = dict(
    test_values_and_gradients_of_plain_jax=True,
    test_bfloat16_without_states=True,
    test_random_segments=True,
    test_isolated_to_the_bit=True,
)


def inputs(B=SEGMENT_IDS.shape[0], T=SEGMENT_IDS.shape[1], K=8, dtype=jnp.float32):
    return make_inputs(B, T, 1, 2, K, K, dtype=dtype, num_states=B)


@pytest.mark.interpreted
def test_values_and_gradients_of_the_kernels():
    assert_segments(FUSED, inputs())


def test_values_and_gradients_of_plain_jax():
    assert_segments(XLA, inputs())


@pytest.mark.parametrize("implementation", ["xla", "fused"])
def test_bfloat16_without_states(implementation):
    x = inputs(dtype=jnp.bfloat16)
    x.pop("initial_state")
    assert_segments(over_segments(chunk_gated_delta_rule, implementation, False), x)


@pytest.mark.interpreted
@settings(max_examples=10, deadline=None)
@given(st.integers(0, 2**16))
def test_random_segments(seed):
    assert_random_segments(FUSED, inputs(), seed)


def test_isolated():
    """Where a segment begins "xla" has a gate that forgets, and sums of gates before it round what follows."""
    assert_isolated(XLA, inputs(), segment_ids=SEGMENT_IDS, tolerance=1e-6)


@pytest.mark.interpreted
def test_isolated_to_the_bit():
    assert_isolated(FUSED, inputs(), segment_ids=SEGMENT_IDS)


def test_one_launch_a_direction():
    assert segment_launches(FUSED, inputs()) == (1, 3)


@pytest.mark.tpu
@pytest.mark.skipif(not tpu.has_libtpu(), reason="libtpu is not installed")
@pytest.mark.parametrize("chip", CHIPS)
def test_compiles(chip):
    """Forward and backward with states, by masks and without."""
    x = inputs(2, 200, 128, jnp.bfloat16)
    assert "tpu_custom_call" in compile_segments(FUSED, x, chip).as_text()
