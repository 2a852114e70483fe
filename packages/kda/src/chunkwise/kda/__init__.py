"""Kimi delta attention: over whole sequences, token by token, and as a serving step."""

from chunkwise.kda.api import chunk_kda, ragged_kda, recurrent_kda
from chunkwise.kda.config import Config

__all__ = [
    "Config",
    "chunk_kda",
    "ragged_kda",
    "recurrent_kda",
]
