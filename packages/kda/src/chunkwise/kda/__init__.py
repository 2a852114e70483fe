"""Kimi delta attention: over whole sequences, token by token, and as a serving step."""

from chunkwise.kda.api import chunk_kda, ragged_kda, recurrent_kda
from chunkwise.kda.config import Config
from chunkwise.shared import version

__version__ = version.of(__name__)
__all__ = [
    "Config",
    "chunk_kda",
    "ragged_kda",
    "recurrent_kda",
]
