"""The cost of the gated norm."""

from jax.experimental import pallas as pl


def cost(*, rows: int, D: int, itemsize: int = 2, backward: bool = False) -> pl.CostEstimate:
    """Return the cost of the norm of `rows` rows of D channels, or of its gradient.

    Args:
      rows, D: sizes.
      itemsize: bytes of a number of x, z and y.
      backward: the cost of the gradient, which computes the norm again.
    """
    numbers = rows * D
    # The forward reads x and z and writes y; the backward reads x, z and dy and writes dx and dz.
    return pl.CostEstimate(
        flops=numbers * (20 if backward else 8),
        transcendentals=numbers,
        bytes_accessed=numbers * itemsize * (5 if backward else 3),
    )
