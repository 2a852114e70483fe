"""Exact inverse of unit lower triangular chunks."""

from chunkwise.shared import version
from chunkwise.solve_tril.api import solve_tril
from chunkwise.solve_tril.config import Config

__version__ = version.of(__name__)
__all__ = ["Config", "solve_tril"]
