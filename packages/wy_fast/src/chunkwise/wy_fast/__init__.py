"""Effective keys and values of the delta rule."""

from chunkwise.shared import version
from chunkwise.wy_fast.api import recompute_w_u
from chunkwise.wy_fast.config import Config

__version__ = version.of(__name__)
__all__ = ["Config", "recompute_w_u"]
