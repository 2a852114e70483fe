"""Gated linear attention, simple or with gates per channel: over whole sequences, token by token, as a serving step."""

from chunkwise.fused_gla.api import (
    chunk_gla,
    chunk_simple_gla,
    ragged_gla,
    ragged_simple_gla,
    recurrent_gla,
    recurrent_simple_gla,
)
from chunkwise.fused_gla.config import Config
from chunkwise.shared import version

__version__ = version.of(__name__)
__all__ = [
    "Config",
    "chunk_gla",
    "chunk_simple_gla",
    "ragged_gla",
    "ragged_simple_gla",
    "recurrent_gla",
    "recurrent_simple_gla",
]
