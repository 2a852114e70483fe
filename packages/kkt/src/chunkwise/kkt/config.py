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


def vmem_bytes_per_head(C: int, K: int, itemsize: int) -> int:
    """Return the VMEM one value head takes: two buffers of k and A, and the float32 tiles in flight."""
    return 2 * C * K * itemsize + 2 * C * C * 4 + 4 * C * C * 4


def default_for(H: int, HV: int, C: int, K: int, itemsize: int, per_channel: bool = False) -> Config:
    """Return the Config for these shapes; gates per channel are six times the work a head, so fewer heads fit."""
    return Config(heads=pick_heads(HV, H, vmem_bytes_per_head(C, K, itemsize), most=2 if per_channel else 32))
