"""What is not finite in one sequence must not change one bit of another, nor of another row of a batch."""

import jax.numpy as jnp
import pytest

from chunkwise.kda import chunk_kda
from chunkwise.shared.testing.inputs import make_inputs
from tests.poison import assert_operator_isolated

# An empty sequence, three in one chunk, one over three chunks that ends inside a block of 8 rows, and padding.
LENGTHS = (3, 0, 4, 30, 13)
# The gated delta rule, whose grid steps keep sequences apart in the same way, has a quick case.
THOROUGH = dict(test_isolated=True)


@pytest.mark.parametrize("implementation", ["xla", "fused"])
@pytest.mark.parametrize(
    ("of", "dtype", "bound"),
    [
        *((of, jnp.float32, None) for of in ("rows with states", "sequences with states", "sequences")),
        # One product over blocks of 8 rows, in the backward too, or in the forward of bfloat16 alone.
        ("sequences", jnp.float32, -5.0),
        ("sequences", jnp.bfloat16, None),
    ],
)
def test_isolated(of, dtype, bound, implementation):

    def make(B, T, num_states):
        x = make_inputs(B, T, 1, 2, 16, 8, dtype=dtype, per_channel=True, num_states=num_states)
        return x | dict(g=jnp.maximum(x["g"], -5.0))

    assert_operator_isolated(chunk_kda, make, of, LENGTHS, min_gate=bound, implementation=implementation)
