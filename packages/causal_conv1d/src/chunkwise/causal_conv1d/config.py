"""Tile sizes of the kernels, and their cost for XLA's scheduler, the docstrings and the benchmarks."""

import dataclasses

from jax.experimental import pallas as pl

from chunkwise.shared.kernels import packed

# How many tokens before a block the convolution may read: the rows of a float32 register.
HALO = 8
WIDTHS = range(2, HALO + 1)


@dataclasses.dataclass(frozen=True)
class Config:
    """Tile sizes.

    Attributes:
      tokens: tokens of a grid step, a multiple of 16.
      channels: channels of a grid step, a multiple of 128.
    """

    tokens: int
    channels: int


def default_for(T: int, D: int) -> Config:
    """Return the Config for T tokens of D channels."""
    tokens = min(512, -(-T // 16) * 16)
    return Config(tokens, min(4 * packed.LANES, packed.pad_lanes(D)))


def cost(*, B: int, T: int, D: int, W: int, itemsize: int = 2, backward: bool = False) -> pl.CostEstimate:
    """Return the cost of the convolution, or of its gradient.

    Args:
      B, T, D, W: sizes.
      itemsize: bytes of a number of x and y.
      backward: the cost of the gradient, which computes the convolution again.
    """
    numbers = B * T * D
    # The forward reads x and writes y; the backward reads x and dy and writes dx. The gradient has two more sums over W
    # taps, for x and for the weight.
    return pl.CostEstimate(
        flops=2 * numbers * W * (3 if backward else 1),
        transcendentals=numbers,
        bytes_accessed=numbers * itemsize * (3 if backward else 2),
    )
