"""What is not finite in one sequence reaches no other: every bit of the others is as if it were not there.

Every input of every sequence is poisoned in turn, and every cotangent; outputs, states and gradients are compared.
"""

import functools

import jax.numpy as jnp
import pytest

from chunkwise.pipeline.check import operator_inputs
from chunkwise.pipeline.operators import CHUNKED, RECURRENT
from chunkwise.shared.testing import assert_isolated, boundaries

# All of the first three share the first chunk of the stream; the third goes on into the second chunk; three tokens of
# padding. One sequence is empty.
PACKED = boundaries(4, 0, 5, 8)
T, ROWS = 20, 2


def run(operator, implementation, states, x, cu_seqlens):
    """Return the results of an operator by name."""
    options = {"chunk_size": 16} if operator.chunked else {}
    if operator.delta:
        options["use_qk_l2norm_in_kernel"] = True
    o, state = operator.function(
        **x, cu_seqlens=cu_seqlens, output_final_state=states, implementation=implementation, **options
    )
    return {"o": o, "final_state": state} if states else {"o": o}


@pytest.mark.parametrize("batch", ["pack with states", "pack", "rows"])
@pytest.mark.parametrize(
    ("operator", "implementation"),
    [(x, i) for x in (*CHUNKED, *RECURRENT) for i in x.implementations],
    ids=lambda x: x if isinstance(x, str) else x.name,
)
def test_sequences_are_isolated(operator, implementation, batch):
    B, cu_seqlens = (ROWS, None) if batch == "rows" else (1, PACKED)
    states = batch != "pack"
    N = 0 if not states else B if cu_seqlens is None else len(cu_seqlens) - 1
    x = operator_inputs(operator, B, T, 1, 1, 8, 8, dtype=jnp.float32, num_states=N)
    fn = functools.partial(run, operator, implementation, states)
    assert_isolated(fn, x, cu_seqlens, shared=("g_gamma",))
