"""chunk.py against the float64 recurrence, and the interpreted kernels against chunk.py."""

import pytest

from chunkwise.fused_gla.chunk import chunk, chunk_bwd
from tests.chunk_suite import CASES, assert_kernel, assert_recurrence, make_case
from tests.either_gla import chunk_either_gla as operator

# The reference compares the kernels with the recurrence.
THOROUGH = dict(test_recurrence=True, test_kernels=lambda per_channel: not per_channel)


gates = pytest.mark.parametrize("per_channel", [False, True], ids=["per head", "per channel"])


@pytest.mark.parametrize("case", CASES)
@gates
def test_recurrence(per_channel, case):
    assert_recurrence(chunk, chunk_bwd, *make_case(case, per_channel=per_channel, delta_rule=False))


@pytest.mark.parametrize("case", CASES)
@gates
def test_kernels(per_channel, case):
    assert_kernel(operator, chunk, chunk_bwd, *make_case(case, per_channel=per_channel, delta_rule=False))
