"""The launches over tokens that are split over devices: together they are the operator, and make nothing twice."""

import jax.numpy as jnp
import pytest

from chunkwise.fused_gdn.operator import OPERATOR
from chunkwise.shared.call.gates import GateActivation
from tests import split_suite

FUSED = OPERATOR.implementations["fused"]
CASES = split_suite.CASES | {
    # Value heads that no even number divides share a key head.
    "three": ("bfloat16", (2, 21, 2, 6, 16, 12), {}),
    "four": ("bfloat16", (1, 70, 2, 8, 16, 12), {}),
    # 32 heads a step, in the order of products that was searched for.
    "measured": ("bfloat16", (1, 130, 16, 32, 8, 8), {}),
    # Several chunks a grid step, of which the last one has one; the inverses of the map are read.
    "nine chunks": ("bfloat16", (1, 530, 1, 2, 8, 12), {}),
}
THOROUGH = dict(
    # Over devices of a mesh the end-to-end tests have quick ones.
    test_together_they_are_the_operator=True,
    test_a_segment_that_is_not_finite=True,
)


@pytest.mark.parametrize("case", CASES)
def test_together_they_are_the_operator(case):
    split_suite.assert_split(FUSED, *split_suite.make(CASES[case]), GateActivation())


@pytest.mark.parametrize("name", ["k", "v", "g"])
def test_a_segment_that_is_not_finite(name):
    """It spoils its own results alone, also where the operator is given what was made of its values."""
    x, fixed = split_suite.make(CASES["segments-32"])
    x[name] = x[name].at[0, 10].set(jnp.nan).at[1, 39].set(jnp.nan)
    split_suite.assert_split(FUSED, x, fixed, GateActivation())
