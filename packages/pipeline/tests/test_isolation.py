"""What is not finite in one sequence reaches no other in a chain of stages: every bit of the others stays.

Every input of every sequence is poisoned in turn, and every cotangent; outputs, states and gradients are compared.
"""

import functools

import jax.numpy as jnp
import pytest

from chunkwise.pipeline.operators import CHUNKED, operator_inputs
from chunkwise.shared.testing.inputs import boundaries
from tests.poison import assert_isolated

# All of the first three share the first chunk of the stream; the third goes on into the second chunk; three tokens of
# padding. One sequence is empty.
PACKED = boundaries(4, 0, 5, 8)
T, ROWS = 20, 2


def run(operator, x, cu_seqlens):
    """Return the results of an operator by name."""
    options = {"use_qk_l2norm_in_kernel": True} if operator.delta else {}
    o, state = operator.function(
        **x, cu_seqlens=cu_seqlens, output_final_state=True, chunk_size=16, implementation="staged", **options
    )
    return {"o": o, "final_state": state}


# Every package tests the implementations that it has itself; the chains of stages are the pipeline's own. A chunk of a
# stage holds one sequence, so states make no difference to the masks: one pack stands for both. Rows are what every
# stage is tested on by itself. The stages of the others are those of the delta rule. Every stage has a quick test of
# its own, so the chain is thorough.
THOROUGH = dict(test_sequences_are_isolated=True)


@pytest.mark.parametrize("batch", ["pack with states", "rows"])
@pytest.mark.parametrize("operator", CHUNKED, ids=lambda operator: operator.name)
def test_sequences_are_isolated(operator, batch):
    B, cu_seqlens = (ROWS, None) if batch == "rows" else (1, PACKED)
    N = B if cu_seqlens is None else len(cu_seqlens) - 1
    x = operator_inputs(operator, B, T, 1, 1, 8, 8, dtype=jnp.float32, num_states=N)
    fn = functools.partial(run, operator)
    assert_isolated(fn, x, cu_seqlens, shared=("g_gamma",))
