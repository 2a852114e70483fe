"""Gated linear attention in one launch per direction, and its token recurrences."""

from chunkwise.fused_gla.api import fused_chunk_gla
from chunkwise.fused_gla.config import Config
from chunkwise.fused_gla.recurrent import recurrent_gla, recurrent_simple_gla

__all__ = [
    "Config",
    "fused_chunk_gla",
    "recurrent_gla",
    "recurrent_simple_gla",
]
