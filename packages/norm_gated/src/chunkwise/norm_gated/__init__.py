"""RMSNorm with a gate."""

from chunkwise.norm_gated.api import rms_norm_gated
from chunkwise.norm_gated.config import Config

__all__ = ["Config", "rms_norm_gated"]
