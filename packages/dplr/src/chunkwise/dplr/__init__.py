"""The delta rule with diagonal plus low-rank transitions, RWKV-7: over sequences, by token, as a serving step."""

from chunkwise.dplr.api import (
    chunk_dplr_delta_rule,
    chunk_rwkv7,
    ragged_dplr_delta_rule,
    recurrent_dplr_delta_rule,
    recurrent_rwkv7,
)
from chunkwise.kda.config import Config
from chunkwise.shared import version

__version__ = version.of(__name__)
__all__ = [
    "Config",
    "chunk_dplr_delta_rule",
    "chunk_rwkv7",
    "ragged_dplr_delta_rule",
    "recurrent_dplr_delta_rule",
    "recurrent_rwkv7",
]
