"""Tile sizes of the kernels, and their cost."""

from dataclasses import dataclass

from jax.experimental import pallas as pl

from chunkwise.shared import tuning


@dataclass(frozen=True)
class Config:
    """Tile sizes.

    Attributes:
      chunks: chunks of a grid step.
      lanes: gates of a grid step: a multiple of 128, or all gates.
    """

    chunks: int
    lanes: int


def default_for(NC: int, C: int, gates: int) -> Config:
    """Return the Config for NC chunks of C tokens with `gates` gates a token."""
    lanes = gates if gates % 128 else 128 * tuning.largest_divisor(gates // 128, 8)
    # Two buffers each of the input and of the output stay within 4 MiB.
    return Config(chunks=tuning.largest_divisor(NC, max(1, 2**18 // (C * max(lanes, 128)))), lanes=lanes)


def cost(*, B: int, T: int, H: int, C: int, K: int = 1, itemsize: int = 4, backward: bool = False) -> pl.CostEstimate:
    """Return the cost of the sum of B T H K gates, or of its gradient, which costs the same.

    Args:
      B, T, H, C, K: sizes; K is 1 for gates per head.
      itemsize: bytes of a gate that is read; the sum is float32.
      backward: the cost of the gradient, which reads float32 and writes the type of the gates.
    """
    del backward
    gates = B * T * H * K
    # The kernel multiplies by a triangle of ones [C, C].
    return pl.CostEstimate(flops=2 * C * gates, transcendentals=0, bytes_accessed=(itemsize + 4) * gates)
