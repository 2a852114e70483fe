"""The delta rule with two keys, GDN-2 and Comba: over whole sequences, token by token, and as a serving step."""

from chunkwise.kda.config import Config
from chunkwise.shared import version
from chunkwise.two_keys.api import chunk_comba, chunk_gdn2, ragged_comba, ragged_gdn2, recurrent_comba, recurrent_gdn2

__version__ = version.of(__name__)
__all__ = [
    "Config",
    "chunk_comba",
    "chunk_gdn2",
    "ragged_comba",
    "ragged_gdn2",
    "recurrent_comba",
    "recurrent_gdn2",
]
