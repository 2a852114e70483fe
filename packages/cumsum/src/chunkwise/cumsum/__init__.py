"""Chunk-local cumulative sum of gates."""

from chunkwise.cumsum.api import chunk_local_cumsum
from chunkwise.cumsum.config import Config
from chunkwise.shared import version

__version__ = version.of(__name__)
__all__ = ["Config", "chunk_local_cumsum"]
