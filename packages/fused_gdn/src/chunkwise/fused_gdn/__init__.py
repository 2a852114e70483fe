"""The gated delta rule in one launch: forward, backward and decode."""

from chunkwise.fused_gdn.api import fused_chunk_gated_delta_rule, recurrent_gated_delta_rule
from chunkwise.fused_gdn.config import Config

__all__ = ["Config", "fused_chunk_gated_delta_rule", "recurrent_gated_delta_rule"]
