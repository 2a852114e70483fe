"""The recurrence of states over chunks."""

from chunkwise.chunk_h.api import chunk_fwd_h, chunk_gated_delta_rule_fwd_h
from chunkwise.chunk_h.config import Config
from chunkwise.shared import version

__version__ = version.of(__name__)
__all__ = ["Config", "chunk_fwd_h", "chunk_gated_delta_rule_fwd_h"]
