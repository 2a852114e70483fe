"""Tile sizes of the kernel."""

from chunkwise.shared.kernels import config
from chunkwise.shared.kernels.config import HeadConfig as Config

__all__ = ["Config", "default_for", "vmem_bytes_per_head"]


def vmem_bytes_per_head(C: int, K: int, V: int) -> int:
    """Return the VMEM that one value head takes: two buffers of q, k, v, o and h, and the scores in flight."""
    return 4 * (2 * (2 * C * K + 2 * C * V + K * V) + 2 * C * V + 3 * C * C)


def default_for(H: int, HV: int, C: int, K: int, V: int, per_channel: bool = False) -> Config:
    """Return the Config for these shapes."""
    return config.choose_heads(H, HV, vmem_bytes_per_head(C, K, V), 8, per_channel)
