"""Chunked linear attention, end to end: the operators composed from the kernel packages."""

from chunkwise.pipeline.gated_delta_rule import chunk_gated_delta_rule, recurrent_gated_delta_rule
from chunkwise.pipeline.gla import chunk_gla, chunk_simple_gla, recurrent_gla, recurrent_simple_gla
from chunkwise.pipeline.kda import chunk_kda, recurrent_kda

__all__ = [
    "chunk_gated_delta_rule",
    "chunk_gla",
    "chunk_kda",
    "chunk_simple_gla",
    "recurrent_gated_delta_rule",
    "recurrent_gla",
    "recurrent_kda",
    "recurrent_simple_gla",
]
