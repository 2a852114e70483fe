"""chunk.py against the float64 recurrence, and the interpreted kernels against chunk.py."""

from typing import ClassVar

from chunkwise.kda import chunk, chunk_kda
from tests.chunk_suite import ChunkTests


class TestChunk(ChunkTests):
    functions = chunk.chunk, chunk.chunk_bwd
    operator = staticmethod(chunk_kda)
    options: ClassVar = dict(per_channel=True)
