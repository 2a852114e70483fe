"""chunk.py against the float64 recurrence, and the interpreted kernels against chunk.py."""

import pytest

from chunkwise.fused_gdn import chunk_gated_delta_rule as operator
from chunkwise.fused_gdn.chunk import chunk, chunk_bwd
from tests.chunk_suite import CASES, assert_kernel, assert_recurrence, make_case

# The kernels compute the same tiles, and the operator is compared with the recurrence in plain JAX.
# Gradients compare the kernels with the recurrence.
THOROUGH = dict(test_recurrence=True, test_kernels=True)


@pytest.mark.parametrize("case", CASES)
def test_recurrence(case):
    assert_recurrence(chunk, chunk_bwd, *make_case(case, per_channel=False))


@pytest.mark.parametrize("case", CASES)
def test_kernels(case):
    assert_kernel(operator, chunk, chunk_bwd, *make_case(case, per_channel=False))
