"""The cost of the convolution."""

from jax.experimental import pallas as pl


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
