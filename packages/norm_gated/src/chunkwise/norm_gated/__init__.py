"""RMSNorm with a gate."""

from chunkwise.norm_gated.api import rms_norm_gated
from chunkwise.norm_gated.config import Config
from chunkwise.shared import version

__version__ = version.of(__name__)
__all__ = ["Config", "rms_norm_gated"]
