"""Tile sizes of the kernels, and their cost."""

from jax.experimental import pallas as pl

from chunkwise.shared import tuning
from chunkwise.shared.tuning import HeadConfig as Config

__all__ = ["Config", "cost", "default_for"]


def default_for(H: int, HV: int, C: int, K: int, V: int, per_channel: bool = False) -> Config:
    """Return the Config for these shapes."""
    # Two buffers of k, v, w, u and A_inv, and the products in flight.
    bytes_per_head = 4 * (2 * (2 * C * K + 2 * C * V + C * C) + C * K + C * V + 2 * C * C)
    return tuning.choose_heads(H, HV, bytes_per_head, 8, per_channel)


def cost(
    *, B: int, T: int, H: int, HV: int, K: int, V: int, C: int,
    itemsize: int = 2, per_channel: bool = False, backward: bool = False,
) -> pl.CostEstimate:  # fmt: skip
    """Return the cost of w and u, or of the gradients of their operands.

    Args:
      B, T, H, HV, K, V, C: sizes.
      itemsize: bytes of a number of k and v; everything else is float32.
      per_channel: whether gates are per channel.
      backward: the cost of the gradients of both operands of both products.
    """
    tokens = B * T
    gates = HV * (K if per_channel else 1)
    # k, v, A_inv, beta and the gates are read, w and u are written. The backward reads dw and du, and writes the
    # gradients of the operands.
    operands = (H * K + HV * V) * itemsize + 4 * HV * (C + 1) + 4 * gates
    return pl.CostEstimate(
        flops=2 * tokens * C * HV * (K + V) * (2 if backward else 1),
        transcendentals=tokens * gates,
        bytes_accessed=tokens * (operands * (2 if backward else 1) + 4 * HV * (K + V)),
    )
