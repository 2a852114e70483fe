"""Rows of segments: values, gradients, isolation, and that there is one launch and one program for all ids."""

from typing import ClassVar

from chunkwise.fused_gdn import chunk_gated_delta_rule
from tests import segment_suite


class TestSegments(segment_suite.SegmentTests):
    operator = staticmethod(chunk_gated_delta_rule)
    launches = (1, 3)
    # A simulated TPU has the values and gradients of the kernels.
    THOROUGH: ClassVar = segment_suite.SHOWN_ELSEWHERE
