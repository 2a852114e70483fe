"""Launches that carry a state from chunk to chunk: their spans, the operands, and the work around the mathematics."""
