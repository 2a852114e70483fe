"""Tile sizes of the kernels, and their cost."""

from jax.experimental import pallas as pl

from chunkwise.shared import tuning
from chunkwise.shared.tuning import HeadConfig as Config

__all__ = ["Config", "cost", "default_for"]


def default_for(H: int, HV: int, C: int, K: int, itemsize: int, per_channel: bool = False) -> Config:
    """Return the Config for these shapes."""
    # Two buffers of k and A, and the float32 tiles in flight.
    bytes_per_head = 2 * C * K * itemsize + 2 * C * C * 4 + 4 * C * C * 4
    return tuning.choose_heads(H, HV, bytes_per_head, 32, per_channel)


def cost(
    *, B: int, T: int, H: int, HV: int, K: int, C: int,
    itemsize: int = 2, per_channel: bool = False, backward: bool = False,
) -> pl.CostEstimate:  # fmt: skip
    """Return the cost of the matrix, or of its gradient.

    Args:
      B, T, H, HV, K, C: sizes.
      itemsize: bytes of a number of k; everything else is float32.
      per_channel: whether gates are per channel: then value heads cannot share products of keys, because their decays
        differ.
      backward: the cost of the gradient, which computes the products of keys again.
    """
    tokens = B * T
    scores = HV if per_channel else H
    gates = HV * (K if per_channel else 1)
    # The gradient of the keys takes two products, one for the rows and one for the columns.
    products = scores + 2 * HV if backward else scores
    exponentials = gates * (C.bit_length() - 1) if per_channel else HV * C
    # k, beta and the gates are read, A is written. The backward reads dA and writes the gradients of the operands.
    operands = H * K * itemsize + 4 * HV + 4 * gates
    return pl.CostEstimate(
        flops=2 * tokens * C * K * products,
        transcendentals=tokens * exponentials,
        bytes_accessed=tokens * (operands * (2 if backward else 1) + 4 * HV * C),
    )
