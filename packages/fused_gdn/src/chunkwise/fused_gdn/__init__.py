"""The gated delta rule: over whole sequences, token by token, and as a serving step."""

from chunkwise.fused_gdn.api import (
    chunk_delta_rule,
    chunk_gated_delta_rule,
    ragged_delta_rule,
    ragged_gated_delta_rule,
    recurrent_delta_rule,
    recurrent_gated_delta_rule,
)
from chunkwise.fused_gdn.config import Config
from chunkwise.shared import version

__version__ = version.of(__name__)
__all__ = [
    "Config",
    "chunk_delta_rule",
    "chunk_gated_delta_rule",
    "ragged_delta_rule",
    "ragged_gated_delta_rule",
    "recurrent_delta_rule",
    "recurrent_gated_delta_rule",
]
