"""Tile sizes of the kernels, and their cost for XLA's scheduler, the docstrings and the benchmarks."""

import dataclasses
import math

from jax.experimental import pallas as pl

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


def cost(
    *, rows: int, D: int, itemsize: int = 2, backward: bool = False, gated: bool = True
) -> pl.CostEstimate:  # fmt: skip
    """Return the cost of the norm of `rows` rows of D channels, or of its gradient.

    Args:
      rows, D: sizes.
      itemsize: bytes of a number of x, z and y.
      backward: the cost of the gradient, which computes the norm again.
      gated: whether the norm has a gate.
    """
    numbers = rows * D
    # The forward reads x and z and writes y; the backward reads x, z and dy and writes dx and dz.
    arrays = 2 + backward + gated * (1 + backward)
    return pl.CostEstimate(
        flops=numbers * (20 if backward else 8),
        transcendentals=numbers,
        bytes_accessed=numbers * itemsize * arrays,
    )
