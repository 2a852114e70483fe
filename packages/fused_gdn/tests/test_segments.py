"""Rows of segments: values, gradients, isolation, and that there is one launch and one program for all ids."""

from typing import ClassVar

from chunkwise.fused_gdn import chunk_gated_delta_rule
from tests.segment_suite import SegmentTests


class TestSegments(SegmentTests):
    operator = staticmethod(chunk_gated_delta_rule)
    launches = (1, 3)
    THOROUGH: ClassVar = dict(
        test_values_and_gradients_of_plain_jax=True,
        # A simulated TPU has them.
        test_values_and_gradients_of_the_kernels=True,
        test_random_segments=True,
        test_isolated=True,
        test_isolated_to_the_bit=True,
        test_compiles=True,
    )
