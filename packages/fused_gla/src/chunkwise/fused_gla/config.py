"""Tile sizes of the kernels."""

from dataclasses import dataclass

from chunkwise.shared import largest_divisor

_BUDGET_BYTES = 32 * 2**20


@dataclass(frozen=True)
class Config:
    """How the launches are cut. The bits of the results do not depend on num_steps.

    Attributes:
      heads: heads a grid step of the forward. They run in lock-step and hide the latency of one another. Divides H.
      heads_bwd: the same for the backward.
      num_steps: chunks a grid step; the largest divisor of the number of chunks up to it is used. The forward keeps one
        state per grid step for the backward, which recomputes the others.
    """

    heads: int
    heads_bwd: int
    num_steps: int


def vmem_bytes_per_head(C: int, K: int, V: int, itemsize: int, per_channel: bool, num_steps: int, bwd: bool) -> int:
    """Return the VMEM that one head takes: two buffers of every block, the states, the tiles in flight."""
    channels = (4 * K + 3 * V if bwd else 2 * K + 2 * V) * itemsize + (4 * K * (1 + bwd) if per_channel else 0)
    states = (num_steps + 8 if bwd else 5) * K * V * 4
    levels = C.bit_length() * C * K * 4 * (3 if bwd else 2) if per_channel else 0
    return 2 * C * num_steps * channels + states + levels + 6 * C * (C + K + V) * 4


def default_for(H: int, K: int, V: int, C: int, NT: int, itemsize: int, per_channel: bool) -> Config:
    """Return the Config for these shapes: at least 4 heads where they fit, then up to 512 tokens, then more heads."""
    K, V = K + -K % 128, V + -V % 128
    num_steps = largest_divisor(NT, 512 // C)
    while True:
        size = (C, K, V, itemsize, per_channel, num_steps)
        heads = largest_divisor(H, min(16, _BUDGET_BYTES // vmem_bytes_per_head(*size, bwd=False)))
        heads_bwd = largest_divisor(H, min(8, _BUDGET_BYTES // vmem_bytes_per_head(*size, bwd=True)))
        if num_steps == 1 or heads_bwd >= min(H, 4):
            return Config(heads, heads_bwd, num_steps)
        num_steps = largest_divisor(NT, num_steps - 1)
