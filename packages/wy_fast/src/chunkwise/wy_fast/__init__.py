"""Effective keys and values of the delta rule."""

from chunkwise.wy_fast.api import recompute_w_u
from chunkwise.wy_fast.config import Config

__all__ = ["Config", "recompute_w_u"]
