"""Kimi delta attention: fused chunk form, forward and backward, and token by token."""

from chunkwise.kda.api import fused_chunk_kda, recurrent_kda
from chunkwise.kda.config import Config

__all__ = ["Config", "fused_chunk_kda", "recurrent_kda"]
