"""Tile sizes of the kernel."""

from dataclasses import dataclass

from chunkwise.shared.kernels import pick_heads


@dataclass(frozen=True)
class Config:
    """How the launch is cut.

    Attributes:
      heads: value heads a grid step. Heads run in lock-step, so more of them hide the latency of one another.
    """

    heads: int


def vmem_bytes_per_head(C: int, K: int, V: int) -> int:
    """Return the VMEM one value head takes: two buffers of q, k, v, o and h, and the scores in flight."""
    return 4 * (2 * (2 * C * K + 2 * C * V + K * V) + 2 * C * V + 3 * C * C)


def default_for(H: int, HV: int, C: int, K: int, V: int, per_channel: bool = False) -> Config:
    """Return the Config for these shapes; gates per channel are six times the work a head, so fewer heads fit."""
    return Config(heads=pick_heads(HV, H, vmem_bytes_per_head(C, K, V), most=2 if per_channel else 8))
