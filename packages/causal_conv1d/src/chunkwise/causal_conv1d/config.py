"""Tile sizes of the kernels."""

import dataclasses

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
