"""Gated DeltaProduct, several steps of the delta rule a token: whole sequences, token by token, as a serving step."""

from chunkwise.delta_product.api import (
    chunk_gated_delta_product,
    ragged_gated_delta_product,
    recurrent_gated_delta_product,
)
from chunkwise.fused_gdn.config import Config
from chunkwise.shared import version

__version__ = version.of(__name__)
__all__ = ["Config", "chunk_gated_delta_product", "ragged_gated_delta_product", "recurrent_gated_delta_product"]
