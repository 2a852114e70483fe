"""The interaction matrix of the delta rule, chunk by chunk."""

from chunkwise.kkt.api import chunk_scaled_dot_kkt
from chunkwise.kkt.config import Config
from chunkwise.shared import version

__version__ = version.of(__name__)
__all__ = ["Config", "chunk_scaled_dot_kkt"]
