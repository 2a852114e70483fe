"""chunk.py against the float64 recurrence, and the interpreted kernels against chunk.py."""

import functools
from typing import ClassVar

import pytest

from chunkwise.two_keys import chunk, chunk_gdn2
from tests.chunk_suite import CASES, ChunkTests, assert_recurrence, make_case

THOROUGH = dict(test_recurrence_of_erase_keys_before_the_decay=True)
BEFORE_DECAY = [functools.partial(function, erase_before_decay=True) for function in (chunk.chunk, chunk.chunk_bwd)]


class TestGdn2(ChunkTests):
    functions = chunk.chunk, chunk.chunk_bwd
    operator = staticmethod(chunk_gdn2)
    options: ClassVar = dict(per_channel=True, erase="gate")


@pytest.mark.parametrize("case", CASES)
def test_recurrence_of_erase_keys_before_the_decay(case):
    assert_recurrence(*BEFORE_DECAY, *make_case(case, per_channel=True, erase="gate"), erase_before_decay=True)
