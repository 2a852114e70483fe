"""Tile sizes of the kernels, and their cost."""

from dataclasses import dataclass

from jax.experimental import pallas as pl

from chunkwise.shared import tuning


@dataclass(frozen=True)
class Config:
    """Tile sizes.

    Attributes:
      matrices: how many matrices a grid step inverts in lock-step. The rows of a matrix are eliminated one after the
        other, and other matrices fill the time in which a row waits. Too many spill registers and take long to compile.
    """

    matrices: int


def default_for(NC: int, HV: int, C: int) -> Config:
    """Return the Config for NC chunks of HV heads."""
    return Config(matrices=tuning.largest_divisor(NC * HV, 4096 // C))


def cost(*, B: int, T: int, HV: int, C: int, backward: bool = False) -> pl.CostEstimate:
    """Return the cost of the inverse of every chunk, or of its gradient.

    The rows of 16 x 16 blocks are substituted, 16^3 / 3 flops for a block. Joining neighbours of b rows takes two
    products of b x b blocks; over b = 16, 32, ..., C / 2 they are 2 C (C^2 - 16^2) / 3 flops. The gradient takes two
    products of C x C matrices.
    """
    rows = B * T * HV
    flops = 4 * rows * C * C if backward else rows * (2 * C * C - 256) // 3
    return pl.CostEstimate(flops=flops, transcendentals=0, bytes_accessed=4 * rows * C * (3 if backward else 2))
