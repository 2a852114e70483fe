"""Several chunks a grid step, interpreted, against the float64 recurrence."""

import jax.numpy as jnp
import pytest

from chunkwise.kda import Config, chunk_kda
from chunkwise.kda.operator import OPERATOR
from chunkwise.shared.testing.inputs import make_inputs
from tests import pool_suite, several_chunks_suite

THOROUGH = dict(
    test_segments=True,
    test_segments_are_isolated=True,
    # Rows have bfloat16 in several chunks, and what belongs to which sequence is the same for all types.
    test_packed_sequences=lambda dtype: dtype == jnp.bfloat16,
)
MORE = dict(fwd=1, summary=1, bwd=0)
KERNEL = several_chunks_suite.Kernel(chunk_kda, lambda chunks: Config(2, 2, chunks, chunks), MORE)
# Rows so long that the inverse has a stage of its own.
LONG = KERNEL._replace(more=MORE | dict(fwd=2, summary=2))


@pytest.mark.parametrize(
    ("dtype", "sizes", "more"),
    [
        # Two rows, of which the last grid step has one of three chunks, and this chunk some tokens.
        (jnp.float32, (2, 200, 1, 2, 24, 40), dict(num_states=2, per_channel=True)),
        # Two blocks of two heads side by side; the second path after strong gates; keys that the kernel scales.
        (jnp.bfloat16, (1, 200, 4, 4, 64, 64), dict(normalise=False, per_channel=True, gate="resets")),
    ],
)
def test_values_and_gradients(dtype, sizes, more):
    x = make_inputs(*sizes, dtype=dtype, **more)
    KERNEL.assert_values_and_gradients(x, normalise=not more.get("normalise", True))


def test_long_rows():
    """The state goes through a chunk two grid steps after it is prepared, with rows after strong gates."""
    x = make_inputs(1, 310, 2, 2, 24, 40, dtype=jnp.bfloat16, num_states=1, per_channel=True, gate="resets")
    LONG.assert_values_and_gradients(x, normalise=False, chunks=2)


@pytest.mark.parametrize(("kernel", "T"), [(KERNEL, 130), (LONG, 310)])
def test_rows_are_isolated(kernel, T):
    kernel.assert_rows_are_isolated(make_inputs(3, T, 1, 2, 24, 40, per_channel=True))


@pytest.mark.parametrize(("kernel", "T"), [(KERNEL, 130), (LONG, 310)])
def test_segments(kernel, T):
    kernel.assert_segments(make_inputs(2, T, 2, 2, 24, 40, num_states=2, per_channel=True))


def test_segments_are_isolated():
    KERNEL.assert_segments_are_isolated(make_inputs(1, 130, 1, 2, 24, 40, num_states=1, per_channel=True))


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_packed_sequences(dtype):
    KERNEL.assert_packed(make_inputs(1, 208, 2, 2, 24, 40, dtype=dtype, num_states=3, per_channel=True))


def test_prefills():
    x = make_inputs(1, pool_suite.PREFILL_TOKENS, 2, 2, 24, 40, per_channel=True)
    KERNEL.assert_prefills(OPERATOR, x, jnp.bfloat16)
