"""Tile sizes of the kernels."""

from dataclasses import dataclass

from chunkwise.shared import pick_heads


@dataclass(frozen=True)
class Config:
    """How the launches are cut.

    Attributes:
      heads: value heads a grid step of the forward; at most `backward_heads` where it keeps what the backward needs.
      backward_heads: value heads a grid step of the backward.
    """

    heads: int
    backward_heads: int


def vmem_bytes_per_head(C: int, K: int, V: int, itemsize: int) -> int:
    """Return the VMEM one value head of the forward takes: two buffers of its blocks, its state, tiles in flight."""
    return 2 * C * (2 * K + 2 * V) * itemsize + 8 * C * K + 4 * K * V * 2 + 4 * C * (8 * K + 3 * V + 4 * C)


def default_for(H: int, HV: int, C: int, K: int, V: int, itemsize: int) -> Config:
    """Return the Config for these shapes; K and V already padded to lanes."""
    size = vmem_bytes_per_head(C, K, V, itemsize)
    return Config(
        heads=pick_heads(HV, H, size, most=32),
        backward_heads=pick_heads(HV, H, 2 * size, most=16),
    )
