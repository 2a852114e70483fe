"""The launches over tokens that are split over devices: together they are the operator, and make nothing twice."""

import jax.numpy as jnp
import pytest

from chunkwise.shared.call.gates import GateActivation
from chunkwise.shared.testing.inputs import boundaries
from tests.either_two_keys import KINDS
from tests.segment_suite import SEGMENT_IDS
from tests.split_suite import assert_split

# Type, sizes and form of the batch. The wide case takes two runs, one without values.
CASES = {
    "rows": ("float32", (2, 21, 1, 2, 8, 12), {}),
    "wide": ("bfloat16", (2, 21, 2, 4, 136, 130), {}),
    "documents": ("float32", (1, 24, 1, 2, 8, 12), dict(cu_seqlens=boundaries(1, 17, 0, 3))),
    "segments": ("bfloat16", (*SEGMENT_IDS.shape, 1, 2, 8, 12), dict(segment_ids=jnp.asarray(SEGMENT_IDS))),
}
# The launches are those of kda and of the gated delta rule, whose tests are quick.
THOROUGH = dict(test_together_they_are_the_operator=True)


@pytest.mark.parametrize("implementation", ["fused"])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("kind", KINDS)
def test_together_they_are_the_operator(kind, implementation, case):
    dtype, sizes, fixed = CASES[case]
    N = len(fixed["cu_seqlens"]) - 1 if "cu_seqlens" in fixed else sizes[0]
    x = KINDS[kind].inputs(*sizes, dtype=jnp.dtype(dtype), num_states=N)
    assert_split(KINDS[kind].record.implementations[implementation], x, fixed, GateActivation())
