"""Chunk-local cumulative sum of gates."""

from chunkwise.cumsum.api import chunk_local_cumsum
from chunkwise.cumsum.config import Config

__all__ = ["Config", "chunk_local_cumsum"]
