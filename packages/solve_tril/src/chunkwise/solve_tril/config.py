"""Tile sizes of the kernel."""

from dataclasses import dataclass

from chunkwise.shared.kernels import launcher


@dataclass(frozen=True)
class Config:
    """How the launch is cut.

    Attributes:
      matrices: chunks of heads inverted in lock-step in a grid step: the rows of one matrix are eliminated in a chain,
        which others hide. Too many spill registers and take long to compile.
    """

    matrices: int


def default_for(NC: int, HV: int, C: int) -> Config:
    """Return the Config for NC chunks of HV heads."""
    return Config(matrices=launcher.largest_divisor(NC * HV, 4096 // C))
