"""Several chunks a grid step, interpreted, against the float64 recurrence."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from chunkwise.kda import Config, chunk_kda
from chunkwise.shared.testing.inputs import make_inputs
from tests.recurrence import assert_recurrence
from tests.traced import launches


def run(chunks, output_final_state=True, use_qk_l2norm_in_kernel=False, **x):
    """Return the output and the final states of chunks of 16, so many of them in a grid step."""
    call = lambda x: chunk_kda(
        **x, output_final_state=True, chunk_size=16, implementation="fused", config=Config(2, 2, chunks, chunks),
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
    )  # fmt: skip
    T, HV = x["v"].shape[1:3]
    gradients = jax.grad(lambda x: call(x)[0].astype(jnp.float32).sum())
    # Beside the steps of a row, a launch has those in which its later stages still have chunks.
    rows, steps, more = len(x["v"]) * HV // 2, -(-T // (chunks * 16)), dict(fwd=1, summary=1, bwd=0)
    for name, count, _, _ in launches(call, x) + launches(gradients, x):
        assert count == rows * (steps + more[name.split("_")[-2]])
    return call(x)


@pytest.mark.parametrize(
    ("dtype", "sizes", "more"),
    [
        # Two rows, of which the last grid step has one of three chunks, and this chunk some tokens.
        (jnp.float32, (2, 200, 1, 2, 24, 40), dict(num_states=2, per_channel=True)),
        # Two blocks of heads; the second path after strong gates; keys that the kernel scales to unit length.
        (jnp.bfloat16, (1, 200, 2, 4, 24, 40), dict(normalise=False, per_channel=True, gate="resets")),
    ],
)
def test_values_and_gradients(dtype, sizes, more):
    x = make_inputs(*sizes, dtype=dtype, **more)
    unit = not more.get("normalise", True)
    assert_recurrence(run, x, chunks=3, use_qk_l2norm_in_kernel=unit, output_final_state=True)


def test_rows_are_isolated():
    """What a row leaves in fast memory is not in the next one, not even NaN."""
    x = make_inputs(3, 130, 1, 2, 24, 40, per_channel=True)
    spoilt = x | {"v": x["v"].at[0, 5].set(jnp.nan)}
    for found, expected in zip(run(2, **spoilt), run(2, **x), strict=True):
        np.testing.assert_array_equal(found[1:], expected[1:])
        assert np.isnan(found[0]).any()
