"""chunk.py against the float64 recurrence, and the interpreted kernels against chunk.py."""

from typing import ClassVar

from chunkwise.fused_gdn import chunk, chunk_gated_delta_rule
from tests.chunk_suite import ChunkTests


class TestChunk(ChunkTests):
    functions = chunk.chunk, chunk.chunk_bwd
    operator = staticmethod(chunk_gated_delta_rule)
    options: ClassVar = dict(per_channel=False)
