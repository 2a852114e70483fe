"""What is not finite in one sequence changes no bit of the others."""

import jax.numpy as jnp
import pytest

from chunkwise.fused_gla import Config
from chunkwise.shared.testing.inputs import make_inputs
from tests.either_gla import chunk_either_gla
from tests.poison import assert_operator_isolated

# Chunks of 16: two hold several sequences, one lies inside a sequence, and the last is padding.
LENGTHS = (3, 0, 40, 5)
# Quick are gates per channel with states in the kernel.
QUICK = ("fused", "sequences with states", "channel")
THOROUGH = dict(test_isolated=lambda implementation, of, gate: (implementation, of, gate) != QUICK)


@pytest.mark.parametrize("implementation", ["xla", "fused"])
@pytest.mark.parametrize(
    ("of", "gate"),
    [
        *((of, gate) for of in ("sequences", "sequences with states") for gate in ("head", "channel")),
        ("rows with states", "head and constant"),
    ],
)
def test_isolated(of, gate, implementation):
    def make(B, T, num_states):
        # The kernels have a product for all pairs in bfloat16.
        dtype = jnp.bfloat16 if (implementation, gate) == ("fused", "channel") else jnp.float32
        x = make_inputs(B, T, 2, K=4, V=3, dtype=dtype, num_states=num_states, per_channel=gate == "channel")
        del x["beta"]
        return x | (dict(g_gamma=jnp.asarray([-0.1, -1.0])) if "constant" in gate else {})

    config = Config(2, 2, 2) if implementation == "fused" and "sequences" in of else None
    assert_operator_isolated(chunk_either_gla, make, of, LENGTHS, implementation=implementation, config=config)
