"""What the inverse costs."""

from jax.experimental import pallas as pl


def cost(*, B: int, T: int, HV: int, C: int, backward: bool = False) -> pl.CostEstimate:
    """Return the cost of the inverse of every chunk, or of its gradient.

    The rows of 16 x 16 blocks are substituted, 16^3 / 3 flops each. Joining neighbours of b rows takes two products of
    b x b blocks; over b = 16, 32, ..., C / 2 they are 2 C (C^2 - 16^2) / 3 flops. The gradient takes two products of
    C x C matrices.
    """
    rows = B * T * HV
    flops = 4 * rows * C * C if backward else rows * (2 * C * C - 256) // 3
    return pl.CostEstimate(flops=flops, transcendentals=0, bytes_accessed=4 * rows * C * (3 if backward else 2))
