"""The output of chunked linear attention."""

from chunkwise.chunk_o.api import chunk_fwd_o
from chunkwise.chunk_o.config import Config
from chunkwise.shared import version

__version__ = version.of(__name__)
__all__ = ["Config", "chunk_fwd_o"]
