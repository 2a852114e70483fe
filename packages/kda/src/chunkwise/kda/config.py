"""Tile sizes of the kernels."""

from dataclasses import dataclass

from chunkwise.shared import tuning


@dataclass(frozen=True)
class Config:
    """Tile sizes.

    Attributes:
      heads: value heads of a grid step of the forward: whole groups that share a key head, or a part of a group.
      heads_bwd: value heads of a grid step of the backward, by the same rule.
    """

    heads: int
    heads_bwd: int


def vmem_bytes_per_head(C: int, K: int, V: int, itemsize: int) -> int:
    """Return the bytes of VMEM for a value head of the forward: blocks in two buffers, the state, and tiles."""
    return 2 * C * (2 * K + 2 * V) * itemsize + 8 * C * K + 4 * K * V * 3 + 4 * C * (16 * K + 6 * V + 8 * C)


def default_for(H: int, HV: int, C: int, K: int, V: int, itemsize: int, gates: int = 0) -> Config:
    """Return the Config for these shapes, K and V already padded to lanes; `gates` counts erase and write gates."""
    size = vmem_bytes_per_head(C, K, V, itemsize) + 2 * gates * C * max(K, V) * itemsize
    return Config(
        heads=tuning.pick_heads(HV, H, size, most=16),
        heads_bwd=tuning.pick_heads(HV, H, size * 5 // 4, most=16),
    )
