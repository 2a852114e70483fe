"""The output of chunked linear attention."""

from chunkwise.chunk_o.api import chunk_fwd_o
from chunkwise.chunk_o.config import Config

__all__ = ["Config", "chunk_fwd_o"]
