"""The interaction matrix of the delta rule, chunk by chunk."""

from chunkwise.kkt.api import chunk_scaled_dot_kkt
from chunkwise.kkt.config import Config

__all__ = ["Config", "chunk_scaled_dot_kkt"]
