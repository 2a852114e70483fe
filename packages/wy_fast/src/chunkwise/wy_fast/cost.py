"""What the effective keys and values cost."""

from jax.experimental import pallas as pl


def cost(
    *, B: int, T: int, H: int, HV: int, K: int, V: int, C: int,
    itemsize: int = 2, per_channel: bool = False, backward: bool = False,
) -> pl.CostEstimate:  # fmt: skip
    """Return the cost of w and u, or of the gradients of their operands.

    Args:
      B, T, H, HV, K, V, C: sizes.
      itemsize: bytes of a number of k and v; everything else is float32.
      per_channel: whether gates are per channel.
      backward: the cost of the gradients: those of both operands of both products.
    """
    tokens = B * T
    gates = HV * (K if per_channel else 1)
    # k, v, A_inv, beta and the gates are read, w and u are written. The gradient reads those of w and u and writes
    # those of the operands.
    operands = (H * K + HV * V) * itemsize + 4 * HV * (C + 1) + 4 * gates
    return pl.CostEstimate(
        flops=2 * tokens * C * HV * (K + V) * (2 if backward else 1),
        transcendentals=tokens * gates,
        bytes_accessed=tokens * (operands * (2 if backward else 1) + 4 * HV * (K + V)),
    )
