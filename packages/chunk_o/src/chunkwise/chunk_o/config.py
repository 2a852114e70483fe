"""Tile sizes of the kernels, and their cost."""

from jax.experimental import pallas as pl

from chunkwise.shared import tuning
from chunkwise.shared.tuning import HeadConfig as Config

__all__ = ["Config", "cost", "default_for"]


def default_for(H: int, HV: int, C: int, K: int, V: int, per_channel: bool = False) -> Config:
    """Return the Config for these shapes."""
    # Two buffers of q, k, v, o and h, and the scores in flight.
    bytes_per_head = 4 * (2 * (2 * C * K + 2 * C * V + K * V) + 2 * C * V + 3 * C * C)
    return tuning.choose_heads(H, HV, bytes_per_head, 8, per_channel)


def cost(
    *, B: int, T: int, H: int, HV: int, K: int, V: int, C: int,
    itemsize: int = 2, per_channel: bool = False, backward: bool = False,
) -> pl.CostEstimate:  # fmt: skip
    """Return the cost of the output, or of the gradients of its operands.

    Args:
      B, T, H, HV, K, V, C: sizes.
      itemsize: bytes of a number of q, k, v and o; gates and states are float32.
      per_channel: whether gates are per channel: then value heads cannot share scores, because their decays differ.
      backward: the cost of the gradients, which computes the scores again.
    """
    tokens, chunks = B * T, B * -(-T // C)
    gates = HV * (K if per_channel else 1)
    scores = C * K * (HV if per_channel else H)
    # Forward: the products e^G q S and P v. Backward: the gradients of both operands of these, and of q and k through
    # P.
    products = HV * (2 * C * K + 2 * C * V + 2 * K * V) if backward else HV * (C * V + K * V)
    operands = (2 * H * K + HV * V) * itemsize + 4 * gates
    states = 4 * HV * K * V
    return pl.CostEstimate(
        flops=2 * tokens * (scores + products),
        transcendentals=tokens * (gates * (C.bit_length() - 1) if per_channel else HV * C),
        bytes_accessed=(tokens * operands + chunks * states) * (2 if backward else 1) + tokens * HV * V * itemsize,
    )
