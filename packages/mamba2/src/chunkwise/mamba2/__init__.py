"""Mamba-2, a state space model with a decay per head and step sizes: over sequences, token by token, and in serving."""

from chunkwise.mamba2.api import chunk_mamba2, ragged_mamba2, recurrent_mamba2
from chunkwise.shared import version

__version__ = version.of(__name__)
__all__ = ["chunk_mamba2", "ragged_mamba2", "recurrent_mamba2"]
