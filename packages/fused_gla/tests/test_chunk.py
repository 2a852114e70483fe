"""chunk.py against the float64 recurrence, and the interpreted kernels against chunk.py."""

from typing import ClassVar

from chunkwise.fused_gla import chunk
from tests.chunk_suite import ChunkTests
from tests.either_gla import chunk_either_gla


class TestChannels(ChunkTests):
    functions = chunk.chunk, chunk.chunk_bwd
    operator = staticmethod(chunk_either_gla)
    options: ClassVar = dict(per_channel=True, delta_rule=False)
    # Of the kernels of a layer with gates per channel no other test is quick.
    THOROUGH: ClassVar = dict(test_kernels=False)


class TestHeads(TestChannels):
    options: ClassVar = dict(per_channel=False, delta_rule=False)
    THOROUGH: ClassVar = dict(test_kernels=True)
