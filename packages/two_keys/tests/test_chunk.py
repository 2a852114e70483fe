"""chunk.py against the float64 recurrence, and the interpreted kernels against chunk.py."""

import functools

import pytest

from chunkwise.two_keys import chunk_gdn2 as operator
from chunkwise.two_keys.chunk import chunk, chunk_bwd
from tests.chunk_suite import CASES, assert_kernel, assert_recurrence, make_case

# One of each is quick: the kernels are those of KDA, whose package has them all.
# Gradients compare the kernels with the recurrence.
THOROUGH = dict(test_recurrence=True, test_recurrence_of_erase_keys_before_the_decay=True, test_kernels=True)


BEFORE_DECAY = [functools.partial(function, erase_before_decay=True) for function in (chunk, chunk_bwd)]


@pytest.mark.parametrize("case", CASES)
def test_recurrence(case):
    assert_recurrence(chunk, chunk_bwd, *make_case(case, per_channel=True, erase="gate"))


@pytest.mark.parametrize("case", CASES)
def test_recurrence_of_erase_keys_before_the_decay(case):
    assert_recurrence(*BEFORE_DECAY, *make_case(case, per_channel=True, erase="gate"), erase_before_decay=True)


@pytest.mark.parametrize("case", CASES)
def test_kernels(case):
    assert_kernel(operator, chunk, chunk_bwd, *make_case(case, per_channel=True, erase="gate"))
