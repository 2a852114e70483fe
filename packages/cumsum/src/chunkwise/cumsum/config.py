"""Tile sizes of the kernel."""

from dataclasses import dataclass

from chunkwise.shared.kernels import launcher


@dataclass(frozen=True)
class Config:
    """How the launch is cut.

    Attributes:
      chunks: chunks a grid step.
      lanes: gates a grid step: a multiple of 128, or all of them.
    """

    chunks: int
    lanes: int


def default_for(NC: int, C: int, gates: int) -> Config:
    """Return the Config for NC chunks of C tokens with `gates` gates a token."""
    lanes = gates if gates % 128 else 128 * launcher.largest_divisor(gates // 128, 8)
    # Input, output and two buffers of each stay within 4 MiB a step.
    return Config(chunks=launcher.largest_divisor(NC, max(1, 2**18 // (C * max(lanes, 128)))), lanes=lanes)
