"""What the cumulative sum costs."""

from jax.experimental import pallas as pl


def cost(*, B: int, T: int, H: int, C: int, K: int = 1, itemsize: int = 4, backward: bool = False) -> pl.CostEstimate:
    """Return the cost of the sum of B T gates of H heads and K channels, and of its gradient, which is alike.

    Args:
      B, T, H, C, K: sizes; K is 1 for gates per head.
      itemsize: bytes of a gate that is read; the sum is float32.
      backward: the cost of the gradient, the sum in the other direction: it reads float32 and writes gates.
    """
    del backward
    gates = B * T * H * K
    # The kernel multiplies by a triangle of ones [C, C].
    return pl.CostEstimate(flops=2 * C * gates, transcendentals=0, bytes_accessed=(itemsize + 4) * gates)
