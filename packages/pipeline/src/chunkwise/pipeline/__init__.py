"""Chunked linear attention, end to end: the operators composed from the kernel packages."""

from chunkwise.pipeline.operators import (
    chunk_gated_delta_rule,
    chunk_gla,
    chunk_kda,
    chunk_simple_gla,
    recurrent_gated_delta_rule,
    recurrent_gla,
    recurrent_kda,
    recurrent_simple_gla,
)
from chunkwise.pipeline.ragged import check_step, ragged_gated_delta_rule, ragged_kda, ragged_simple_gla

__all__ = [
    "check_step",
    "chunk_gated_delta_rule",
    "chunk_gla",
    "chunk_kda",
    "chunk_simple_gla",
    "ragged_gated_delta_rule",
    "ragged_kda",
    "ragged_simple_gla",
    "recurrent_gated_delta_rule",
    "recurrent_gla",
    "recurrent_kda",
    "recurrent_simple_gla",
]
