"""The launches over tokens that are split over devices: together they are the operator, and make nothing twice."""

import jax.numpy as jnp
import pytest

from chunkwise.kda.operator import OPERATOR
from chunkwise.shared.operators.gates import Laws
from chunkwise.shared.testing.inputs import boundaries, make_inputs
from chunkwise.shared.testing.laws import raw_inputs
from chunkwise.shared.testing.segmented import SEGMENT_IDS
from chunkwise.shared.testing.split import assert_split

thorough = pytest.mark.thorough
PACKED = dict(cu_seqlens=boundaries(1, 17, 0, 3))
SEGMENTS = dict(segment_ids=jnp.asarray(SEGMENT_IDS))


@pytest.mark.interpreted
@pytest.mark.parametrize(
    ("dtype", "sizes", "fixed", "laws"),
    [
        pytest.param("float32", (2, 21, 1, 2, 8, 12), {}, Laws(True, -5.0), id="rows"),
        pytest.param("bfloat16", (2, 21, 2, 4, 136, 72), {}, Laws(), id="wide", marks=thorough),
        # 16 heads a step, in the order of products that was searched for.
        pytest.param("bfloat16", (1, 130, 16, 16, 8, 8), {}, Laws(), id="measured", marks=thorough),
        pytest.param("float32", (1, 24, 1, 2, 8, 12), PACKED, Laws(True, -5.0), id="documents", marks=thorough),
        pytest.param("bfloat16", (1, 24, 1, 2, 8, 12), PACKED, Laws(), id="documents-bfloat16", marks=thorough),
        pytest.param(
            "bfloat16", (*SEGMENT_IDS.shape, 1, 2, 8, 12), SEGMENTS, Laws(True), id="segments", marks=thorough
        ),
        pytest.param("float32", (*SEGMENT_IDS.shape, 1, 2, 8, 12), SEGMENTS, Laws(), id="segments-32", marks=thorough),
    ],
)
def test_together_they_are_the_operator(dtype, sizes, fixed, laws):
    N = len(fixed["cu_seqlens"]) - 1 if "cu_seqlens" in fixed else sizes[0]
    x = make_inputs(*sizes, dtype=jnp.dtype(dtype), per_channel=True, num_states=N)
    if laws.use_gate_in_kernel:
        x |= {name: y for name, y in raw_inputs(x, dtype=jnp.dtype(dtype)).items() if name != "beta"}
    assert_split(OPERATOR.implementations["fused"], x, fixed, laws)
