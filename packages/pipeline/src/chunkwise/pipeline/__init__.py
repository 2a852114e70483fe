"""Chunked linear attention, end to end: the operators composed from the kernel packages."""

from chunkwise.pipeline.gated_delta_rule import chunk_gated_delta_rule, recurrent_gated_delta_rule

__all__ = ["chunk_gated_delta_rule", "recurrent_gated_delta_rule"]
