"""Tile sizes of the kernels."""

from dataclasses import dataclass

from chunkwise.shared import largest_divisor

_BUDGET_BYTES = 20 * 2**20


@dataclass(frozen=True)
class Config:
    """How the launches are cut. The results do not depend on it, bit by bit.

    Attributes:
      heads: heads a grid step, which run in lock-step and hide the latency of one another. Must divide H.
      num_steps: chunks a grid step; the largest divisor of the number of chunks up to it is used. The forward keeps one
        state per grid step for the backward, which recomputes the others.
    """

    heads: int
    num_steps: int


def vmem_bytes_per_head(C: int, K: int, V: int, itemsize: int, per_channel: bool, num_steps: int) -> int:
    """Return the VMEM one head of the backward takes: two buffers of every block, the states, the tiles in flight."""
    rows = C * num_steps
    blocks = 2 * rows * ((4 * K + 3 * V) * itemsize + (8 * K if per_channel else 0))
    states = (num_steps + 8) * K * V * 4
    tiles = 6 * C * C * 4 + (3 * C.bit_length() * C * K * 4 if per_channel else 8 * C * max(K, V) * 4)
    return blocks + states + tiles


def default_for(H: int, K: int, V: int, C: int, NT: int, itemsize: int, per_channel: bool) -> Config:
    """Return the Config for these shapes: many heads first, then many chunks."""
    num_steps = largest_divisor(NT, max(1, 512 // C))
    while True:
        per_head = vmem_bytes_per_head(C, K, V, itemsize, per_channel, num_steps)
        fitting = [n for n in range(1, min(H, 8) + 1) if H % n == 0 and n * per_head <= _BUDGET_BYTES]
        if num_steps == 1 or (fitting and max(fitting) >= min(H, 4)):
            return Config(heads=max(fitting, default=1), num_steps=num_steps)
        num_steps = largest_divisor(NT, num_steps - 1)
