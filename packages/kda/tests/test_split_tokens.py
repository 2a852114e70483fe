"""The launches over tokens that are split over devices: together they are the operator, and make nothing twice."""

import jax.numpy as jnp
import pytest

from chunkwise.kda.operator import OPERATOR
from chunkwise.shared.call.gates import GateActivation
from chunkwise.shared.testing.inputs import boundaries, make_inputs
from tests.laws import raw_inputs
from tests.segment_suite import SEGMENT_IDS
from tests.split_suite import assert_split

PACKED = dict(cu_seqlens=boundaries(1, 17, 0, 3))
SEGMENTS = dict(segment_ids=jnp.asarray(SEGMENT_IDS))


# Type, sizes, form of the batch, and laws.
CASES = {
    "rows": ("float32", (2, 21, 1, 2, 8, 12), {}, GateActivation(True, -5.0)),
    "wide": ("bfloat16", (2, 21, 2, 4, 136, 72), {}, GateActivation()),
    # 16 heads a step, in the order of products that was searched for.
    "measured": ("bfloat16", (1, 130, 16, 16, 8, 8), {}, GateActivation()),
    "documents": ("float32", (1, 24, 1, 2, 8, 12), PACKED, GateActivation(True, -5.0)),
    "documents-bfloat16": ("bfloat16", (1, 24, 1, 2, 8, 12), PACKED, GateActivation()),
    "segments": ("bfloat16", (*SEGMENT_IDS.shape, 1, 2, 8, 12), SEGMENTS, GateActivation(True)),
    "segments-32": ("float32", (*SEGMENT_IDS.shape, 1, 2, 8, 12), SEGMENTS, GateActivation()),
}
# Over devices of a mesh the end-to-end tests have quick ones.
THOROUGH = dict(test_together_they_are_the_operator=True)


@pytest.mark.parametrize("case", CASES)
def test_together_they_are_the_operator(case):
    dtype, sizes, fixed, laws = CASES[case]
    N = len(fixed["cu_seqlens"]) - 1 if "cu_seqlens" in fixed else sizes[0]
    x = make_inputs(*sizes, dtype=jnp.dtype(dtype), per_channel=True, num_states=N)
    if laws.use_gate_in_kernel:
        x |= {name: y for name, y in raw_inputs(x, dtype=jnp.dtype(dtype)).items() if name != "beta"}
    assert_split(OPERATOR.implementations["fused"], x, fixed, laws)
