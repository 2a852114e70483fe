"""Tile sizes of the kernels."""

import dataclasses
import math

from chunkwise.shared import tuning
from chunkwise.shared.kernels import packed

# Bytes of a block: large enough that copying it takes longer than the overhead of a grid step.
_BLOCK = 2**20
# The most lanes of a block, unless groups make it larger.
_MOST_LANES = 8192


@dataclasses.dataclass(frozen=True)
class Config:
    """Tile sizes.

    Attributes:
      rows: rows of a grid step, a multiple of `strip`.
      groups: groups of channels of a grid step.
      strip: rows that are computed at once, a multiple of 16.
    """

    rows: int
    groups: int
    strip: int


def unit(D: int, width: int) -> int:
    """Return how many lanes are computed at once: the fewest whole registers that hold whole groups of D lanes."""
    return min(math.lcm(D, packed.LANES), width)


def default_for(groups: int, D: int, itemsize: int) -> Config:
    """Return the Config for rows of `groups` groups of D channels of `itemsize` bytes."""
    each = unit(D, groups * D) // D  # groups of a unit
    # A block holds whole units, or all lanes.
    taken = groups
    if groups * D > _MOST_LANES and groups % each == 0:
        taken = each * tuning.largest_divisor(groups // each, max(_MOST_LANES // (each * D), 1))
    strip = 16
    rows = _BLOCK // (taken * D * itemsize) // strip * strip
    return Config(min(max(rows, strip), 1024), taken, strip)
