"""What is not finite in one sequence reaches no other in a chain of stages: every bit of the others stays.

Every input of every sequence is poisoned in turn, and every cotangent; outputs, states and gradients are compared.
"""

import functools

import pytest

from chunkwise.pipeline.operators import CHUNKED
from tests.poison import assert_operator_isolated

# Every package tests the implementations that it has itself; the chains of stages are the pipeline's own. A chunk of a
# stage holds one sequence, so states make no difference to the masks: one pack stands for both. Rows are what every
# stage is tested on by itself. The stages of the others are those of the delta rule. Every stage has a quick test of
# its own, so the chain is thorough.
THOROUGH = dict(test_sequences_are_isolated=True)


@pytest.mark.parametrize("of", ["sequences with states", "rows with states"])
@pytest.mark.parametrize("operator", CHUNKED, ids=lambda operator: operator.name)
def test_sequences_are_isolated(operator, of):
    """Three sequences share the first chunk of the pack; the third goes on into the second chunk."""
    make = functools.partial(operator.source.inputs, H=1, HV=1, K=8, V=8)
    options = {"use_qk_l2norm_in_kernel": True} if operator.delta else {}
    assert_operator_isolated(operator.function, make, of, (4, 0, 5, 8), implementation="staged", **options)
