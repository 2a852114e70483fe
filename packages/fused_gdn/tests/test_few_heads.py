"""Several chunks a grid step, interpreted, against the float64 recurrence."""

import jax
import jax.numpy as jnp
import pytest

from chunkwise.fused_gdn import Config, chunk_gated_delta_rule
from chunkwise.fused_gdn.operator import OPERATOR
from chunkwise.shared.testing.inputs import make_inputs
from tests import pool_suite, several_chunks_suite
from tests.recurrence import assert_recurrence
from tests.traced import launches

THOROUGH = dict(
    test_segments_are_isolated=True,
    # Rows have bfloat16 in several chunks, and what belongs to which sequence is the same for all types.
    test_packed_sequences=lambda dtype: dtype == jnp.bfloat16,
)
MORE = dict(fwd=2, states=1, bwd=0)
KERNEL = several_chunks_suite.Kernel(chunk_gated_delta_rule, lambda chunks: Config(2, 2, chunks), MORE)
FOUR_HEADS = several_chunks_suite.Kernel(chunk_gated_delta_rule, lambda chunks: Config(4, 4, chunks), MORE)


@pytest.mark.parametrize(
    ("dtype", "sizes", "more"),
    [
        # Two rows, of which the last grid step has one of three chunks, and this chunk some tokens.
        (jnp.float32, (2, 200, 1, 2, 24, 40), dict(num_states=2, gate="resets")),
        # Two blocks of heads, on a key head each, which the kernel scales to unit length.
        (jnp.bfloat16, (1, 200, 2, 4, 128, 64), dict(normalise=False)),
        # Rounding of L where keys repeat, and step sizes near 2; four heads, whose grid step begins with the state.
        (jnp.bfloat16, (1, 192, 1, 4, 24, 40), dict(repeat_key=True, beta=1.9, num_states=1)),
    ],
)
def test_values_and_gradients(dtype, sizes, more):
    x = make_inputs(*sizes, dtype=dtype, **more)
    kernel = FOUR_HEADS if "beta" in more else KERNEL
    kernel.assert_values_and_gradients(x, normalise=not more.get("normalise", True))


@pytest.mark.parametrize(("dtype", "HV", "turns"), [("float32", 2, 2), ("bfloat16", 16, 3)])
def test_chunks_in_turn(dtype, HV, turns):
    """Two rows of five grid steps: the forward, and the states by the inverses that it made.

    16 heads pass a chunk in two stages, so that turns overlap.
    """
    x = make_inputs(2, 80 * turns, 1, HV, 24, 40, dtype=jnp.dtype(dtype), num_states=2, gate="resets")
    call = lambda **x: chunk_gated_delta_rule(
        **x, chunk_size=16, implementation="fused", config=Config(HV, HV, turns=turns), use_qk_l2norm_in_kernel=False
    )
    gradients = jax.grad(lambda x: call(**x)[0].astype(jnp.float32).sum())
    counts = [(name.split("_")[-2], steps) for name, steps, *_ in launches(gradients, x)]
    assert counts == [("fwd", 2 * 6), ("states", 2 * 6), ("bwd", 2 * 5 * turns)]
    assert_recurrence(call, x, output_final_state=True)


def test_rows_are_isolated():
    KERNEL.assert_rows_are_isolated(make_inputs(3, 130, 1, 2, 24, 40))


def test_segments():
    KERNEL.assert_segments(make_inputs(2, 130, 1, 2, 24, 40, num_states=2))


def test_segments_are_isolated():
    KERNEL.assert_segments_are_isolated(make_inputs(1, 130, 1, 2, 24, 40, num_states=1))


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_packed_sequences(dtype):
    KERNEL.assert_packed(make_inputs(1, 208, 1, 2, 24, 40, dtype=dtype, num_states=3))


def test_prefills():
    x = make_inputs(1, pool_suite.PREFILL_TOKENS, 1, 2, 24, 40)
    KERNEL.assert_prefills(OPERATOR, x, jnp.bfloat16)
