"""Tile sizes of the kernel."""

from chunkwise.shared.kernels import config
from chunkwise.shared.kernels.config import HeadConfig as Config

__all__ = ["Config", "default_for", "vmem_bytes_per_head"]


def vmem_bytes_per_head(C: int, K: int, itemsize: int) -> int:
    """Return the VMEM that one value head takes: two buffers of k and A, and the float32 tiles in flight."""
    return 2 * C * K * itemsize + 2 * C * C * 4 + 4 * C * C * 4


def default_for(H: int, HV: int, C: int, K: int, itemsize: int, per_channel: bool = False) -> Config:
    """Return the Config for these shapes."""
    return config.choose_heads(H, HV, vmem_bytes_per_head(C, K, itemsize), 32, per_channel)
