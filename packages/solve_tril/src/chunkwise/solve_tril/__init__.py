"""Exact inverse of unit lower triangular chunks."""

from chunkwise.solve_tril.api import solve_tril
from chunkwise.solve_tril.config import Config

__all__ = ["Config", "solve_tril"]
