"""Tile sizes of the kernels, and their cost."""

from jax.experimental import pallas as pl

from chunkwise.shared import tuning
from chunkwise.shared.tuning import HeadConfig as Config

__all__ = ["Config", "cost", "default_for"]


def default_for(H: int, HV: int, C: int, K: int, V: int, per_channel: bool = False) -> Config:
    """Return the Config for these shapes."""
    # Two buffers of every operand and result, and the carried state.
    bytes_per_head = 4 * (2 * (3 * C * K + 2 * C * V + 3 * K * V) + 3 * K * V + 2 * C * V)
    return tuning.choose_heads(H, HV, bytes_per_head, 8, per_channel)


def cost(
    *, B: int, T: int, H: int, HV: int, K: int, V: int, C: int,
    itemsize: int = 2, per_channel: bool = False, delta_rule: bool = True, backward: bool = False,
) -> pl.CostEstimate:  # fmt: skip
    """Return the cost of taking the state through the chunks, or of the gradients of the operands.

    Args:
      B, T, H, HV, K, V, C: sizes.
      itemsize: bytes of a number of k, and without the delta rule of v; everything else is float32.
      per_channel: whether gates are per channel.
      delta_rule: True for `chunk_gated_delta_rule_fwd_h`, which also computes v_new = u - w S; False for `chunk_fwd_h`.
      backward: the cost of the gradients of both operands of every product.
    """
    tokens, chunks = B * T, B * -(-T // C)
    gates = HV * (K if per_channel else 1)
    # k, the values and the gates are read. With the delta rule w is read, too, and v_new is written.
    operands = H * K * itemsize + HV * V * (4 if delta_rule else itemsize) + 4 * gates + 4 * HV * K * delta_rule
    values, states = 4 * HV * V * delta_rule, 4 * HV * K * V
    if backward:
        # The gradients of the operands are written; v_new and h are read, and so are their gradients.
        operands, values, states = 2 * operands, 2 * values, 2 * states
    return pl.CostEstimate(
        flops=2 * tokens * HV * K * V * (2 if delta_rule else 1) * (2 if backward else 1),
        transcendentals=tokens * gates,
        bytes_accessed=tokens * (operands + values) + chunks * states,
    )
