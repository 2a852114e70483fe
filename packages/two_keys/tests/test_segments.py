"""Rows of segments: values, gradients, isolation, and that there is one launch and one program for all ids."""

from typing import ClassVar

from tests.either_two_keys import KINDS
from tests.segment_suite import SegmentTests

ALL = dict(
    test_values_and_gradients_of_plain_jax=True,
    test_random_segments=True,
    test_isolated=True,
    test_isolated_to_the_bit=True,
    test_compiles=True,
    # GLA's kernels have values and gradients of segments, by the same tables.
    test_values_and_gradients_of_the_kernels=True,
)


class TestGdn2(SegmentTests):
    operator = staticmethod(KINDS["gdn2"].chunk)
    launches = (1, 2)
    make_inputs = KINDS["gdn2"].inputs
    THOROUGH: ClassVar = ALL


class TestComba(TestGdn2):
    operator = staticmethod(KINDS["comba"].chunk)
    make_inputs = KINDS["comba"].inputs
    THOROUGH: ClassVar = ALL | dict(test_one_launch_a_direction=True)
