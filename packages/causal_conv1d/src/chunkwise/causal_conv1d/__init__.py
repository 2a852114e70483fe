"""The short causal convolution before linear attention."""

from chunkwise.causal_conv1d.api import causal_conv1d, causal_conv1d_update
from chunkwise.causal_conv1d.config import Config

__all__ = ["Config", "causal_conv1d", "causal_conv1d_update"]
