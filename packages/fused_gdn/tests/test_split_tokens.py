"""The launches over tokens that are split over devices: together they are the operator, and make nothing twice."""

import jax.numpy as jnp
import pytest

from chunkwise.fused_gdn.operator import OPERATOR
from chunkwise.shared.call.gates import GateActivation
from chunkwise.shared.testing.inputs import boundaries, make_inputs
from tests.segment_suite import SEGMENT_IDS
from tests.split_suite import assert_split

PACKED = dict(cu_seqlens=boundaries(1, 17, 0, 3))
SEGMENTS = dict(segment_ids=jnp.asarray(SEGMENT_IDS))
FUSED = OPERATOR.implementations["fused"]


# Type, sizes, and form of the batch.
CASES = {
    "rows": ("float32", (2, 21, 1, 2, 8, 12), {}),
    # Value heads that no even number divides share a key head.
    "three": ("bfloat16", (2, 21, 2, 6, 16, 12), {}),
    "four": ("bfloat16", (1, 70, 2, 8, 16, 12), {}),
    # The map takes a launch of its own.
    "wide": ("bfloat16", (2, 21, 2, 4, 136, 72), {}),
    # 32 heads a step, in the order of products that was searched for.
    "measured": ("bfloat16", (1, 130, 16, 32, 8, 8), {}),
    # Several chunks a grid step, of which the last one has one; the inverses of the map are read.
    "nine chunks": ("bfloat16", (1, 530, 1, 2, 8, 12), {}),
    "documents": ("float32", (1, 24, 1, 2, 8, 12), PACKED),
    "documents-bfloat16": ("bfloat16", (1, 24, 1, 2, 8, 12), PACKED),
    "segments": ("bfloat16", (*SEGMENT_IDS.shape, 1, 2, 8, 12), SEGMENTS),
    "segments-32": ("float32", (*SEGMENT_IDS.shape, 1, 2, 8, 12), SEGMENTS),
}
THOROUGH = dict(
    # Over devices of a mesh the end-to-end tests have quick ones.
    test_together_they_are_the_operator=True,
    test_a_segment_that_is_not_finite=True,
)


@pytest.mark.parametrize("case", CASES)
def test_together_they_are_the_operator(case):
    dtype, sizes, fixed = CASES[case]
    N = len(fixed["cu_seqlens"]) - 1 if "cu_seqlens" in fixed else sizes[0]
    x = make_inputs(*sizes, dtype=jnp.dtype(dtype), num_states=N)
    assert_split(FUSED, x, fixed, GateActivation())


@pytest.mark.parametrize("name", ["k", "v", "g"])
def test_a_segment_that_is_not_finite(name):
    """It spoils its own results alone, also where the operator is given what was made of its values."""
    x = make_inputs(*SEGMENT_IDS.shape, 1, 2, 8, 12, num_states=len(SEGMENT_IDS))
    x[name] = x[name].at[0, 10].set(jnp.nan).at[1, 39].set(jnp.nan)
    assert_split(FUSED, x, SEGMENTS, GateActivation())
