"""The short causal convolution before linear attention."""

from chunkwise.causal_conv1d.api import causal_conv1d, causal_conv1d_update
from chunkwise.causal_conv1d.config import Config
from chunkwise.shared import version

__version__ = version.of(__name__)
__all__ = ["Config", "causal_conv1d", "causal_conv1d_update"]
