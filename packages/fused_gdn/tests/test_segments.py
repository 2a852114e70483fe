"""Rows of segments: values, gradients, isolation, and that there is one launch and one program for all ids."""

import functools

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chunkwise.fused_gdn import fused_chunk_gated_delta_rule
from chunkwise.shared.testing import (
    SEGMENT_IDS,
    TOLERANCE,
    assert_close,
    assert_isolated,
    assert_segments,
    compile_segments,
    make_inputs,
    random_segment_ids,
    reference,
    text_for_tpu,
    tpu,
)

B, T = SEGMENT_IDS.shape


def inputs(dtype=jnp.float32):
    return make_inputs(B, T, 1, 2, 8, 8, dtype=dtype, num_states=B)


@functools.cache
def run_by(implementation, states=True):
    """Return a function of inputs and segment ids; the same one every time, so that its program is compiled once."""

    def run(x, segment_ids):
        o, state = fused_chunk_gated_delta_rule(
            **x, output_final_state=states, segment_ids=segment_ids, chunk_size=16, implementation=implementation,
        )  # fmt: skip
        return dict(o=o, final_state=state) if states else dict(o=o)

    return run


@pytest.mark.parametrize("implementation", ["xla", "fused"])
def test_values_and_gradients(implementation):
    assert_segments(run_by(implementation), inputs())


@pytest.mark.thorough
@pytest.mark.parametrize("implementation", ["xla", "fused"])
def test_bfloat16_without_states(implementation):
    x = inputs(dtype=jnp.bfloat16)
    x.pop("initial_state")
    assert_segments(run_by(implementation, False), x)


@pytest.mark.interpreted
@settings(max_examples=10, deadline=None)
@given(st.integers(0, 2**16))
def test_random_segments(seed):
    """By the program of `test_values_and_gradients`."""
    ids, x = random_segment_ids(seed), inputs()
    o, state = reference(**x, segment_ids=ids)
    got = jax.jit(run_by("fused"))(x, jnp.asarray(ids))
    assert_close("o", got["o"], o, TOLERANCE["float32"])
    assert_close("final_state", got["final_state"], state, TOLERANCE["float32"])


def test_isolated():
    """Where a segment begins "xla" has a gate that forgets, and sums of gates before it round what follows."""
    assert_isolated(run_by("xla"), inputs(), segment_ids=SEGMENT_IDS, tolerance=1e-6)


@pytest.mark.interpreted
def test_isolated_to_the_bit():
    assert_isolated(run_by("fused"), inputs(), segment_ids=SEGMENT_IDS)


def test_one_launch_a_direction():
    x, ids = inputs(), jnp.asarray(SEGMENT_IDS)
    assert text_for_tpu(run_by("fused"), x, ids).count("tpu_custom_call") == 1
    loss = lambda x: sum(jnp.sum(y) for y in run_by("fused")(x, ids).values())
    assert text_for_tpu(jax.grad(loss), x).count("tpu_custom_call") == 3


@pytest.mark.tpu
@pytest.mark.skipif(not tpu.has_libtpu(), reason="libtpu is not installed")
@pytest.mark.parametrize("chip", tpu.CHIPS)
def test_compiles(chip):
    """Forward and backward with states, by masks and without."""
    x = make_inputs(2, 200, 1, 2, 128, 128, dtype=jnp.bfloat16, num_states=2)
    assert "tpu_custom_call" in compile_segments(run_by("fused"), x, chip).as_text()
