"""Rows of segments: values, gradients, isolation, and that there is one launch and one program for all ids."""

from typing import ClassVar

from tests import segment_suite
from tests.either_two_keys import KINDS


class TestGdn2(segment_suite.SegmentTests):
    operator = staticmethod(KINDS["gdn2"].chunk)
    launches = (1, 2)
    make_inputs = KINDS["gdn2"].inputs
    # GLA's kernels have values and gradients of segments, by the same tables.
    THOROUGH: ClassVar = segment_suite.SHOWN_ELSEWHERE


class TestComba(TestGdn2):
    operator = staticmethod(KINDS["comba"].chunk)
    make_inputs = KINDS["comba"].inputs
    THOROUGH: ClassVar = segment_suite.SHOWN_ELSEWHERE | dict(test_one_launch_a_direction=True)
