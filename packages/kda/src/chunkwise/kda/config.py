"""Tile sizes of the kernels."""

from dataclasses import dataclass

from chunkwise.shared import tuning


@dataclass(frozen=True)
class Config:
    """Tile sizes.

    Attributes:
      heads: value heads of a grid step of the forward: whole groups that share a key head, or a part of a group.
      heads_bwd: value heads of a grid step of the backward, by the same rule.
      chunks: the most chunks of a grid step of the forward over rows that are one sequence, or of a piece of a packed
        sequence: see `tuning.piece_chunks`. Few heads leave units idle, and chunks fill them.
      chunks_bwd: the same of the backward.
    """

    heads: int
    heads_bwd: int
    chunks: int = 1
    chunks_bwd: int = 1


def vmem_bytes_per_head(C: int, K: int, V: int, itemsize: int) -> int:
    """Return the bytes of VMEM for a value head of the forward: blocks in two buffers, the state, and tiles."""
    return 2 * C * (2 * K + 2 * V) * itemsize + 8 * C * K + 4 * K * V * 3 + 4 * C * (16 * K + 6 * V + 8 * C)


def default_for(H: int, HV: int, C: int, K: int, V: int, itemsize: int, gates: int = 0) -> Config:
    """Return the Config for these shapes, K and V already padded to lanes; `gates` counts erase and write gates."""
    size = vmem_bytes_per_head(C, K, V, itemsize) + 2 * gates * C * max(K, V) * itemsize
    heads = tuning.pick_heads(HV, H, size, most=16)
    size_bwd, limit = size * 5 // 4, tuning.VMEM_LIMIT_BYTES
    heads_bwd = tuning.pick_heads(HV, H, size_bwd, most=16)
    # The backward of more than 8 heads fills the units by itself.
    chunks_bwd = min(32, 5 * limit // 6 // size_bwd) // heads_bwd if heads_bwd <= 8 else 1
    return Config(
        heads=heads,
        heads_bwd=heads_bwd,
        chunks=max(1, min(8, min(16, limit // 2 // size) // heads)),
        chunks_bwd=max(1, min(8, chunks_bwd)),
    )
