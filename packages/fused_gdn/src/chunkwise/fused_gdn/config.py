"""Tile sizes of the kernels."""

import math
from dataclasses import dataclass

from chunkwise.shared import compat, tuning
from chunkwise.shared.kernels import packed

VMEM_BUDGET = 2 * tuning.VMEM_LIMIT_BYTES // 3


@dataclass(frozen=True)
class Config:
    """Tile sizes.

    Attributes:
      heads: value heads of a grid step, a divisor of HV. Heads run in lock-step, so that they hide the latency of one
        another. If a grid step does not hold whole groups of value heads that share a key head, q and k are repeated in
        memory.
      heads_bwd: the same for the backward, which holds more tiles at once.
      chunks: the most chunks of a grid step in lock-step, over rows that are one sequence, or of a piece of a packed
        sequence: see `tuning.piece_chunks`. Few heads leave units idle, and chunks fill them.
      turns: the chunks that a grid step takes one after the other where `chunks` is 1, over rows that are one sequence
        of whole grid steps. A grid step takes a time of its own, so fewer of them are faster.
    """

    heads: int
    heads_bwd: int
    chunks: int = 1
    turns: int = 1

    @property
    def chunks_bwd(self) -> int:
        """The chunks of the backward."""
        return self.chunks


def vmem_bytes_per_head(C: int, K: int, V: int) -> int:
    """Return the bytes of VMEM for a value head: the state twice, the blocks, and float32 tiles of the computation."""
    return 4 * (2 * K * V + 4 * C * (2 * K + 2 * V) + 3 * (C + K) * (K + packed.LANES))


def default_for(H: int, HV: int, C: int, K: int, V: int) -> Config:
    """Return the Config for these shapes: as many whole groups of heads as fit, or as many heads of a group.

    There are blocks of heads for all cores of the device. Chunks are added up to 32 heads of all chunks together; 16
    heads of one chunk keep narrow matrix units busy, those of v5e and v5p. Two turns are faster than one on all chips,
    and take twice as long to compile.
    """
    size = vmem_bytes_per_head(C, K, V)
    heads = tuning.pick_heads(HV, H, size, min(32, max(1, HV // compat.cores())), VMEM_BUDGET)
    most = 32 if heads < 16 or compat.matrix_columns() > 128 else heads
    chunks = max(1, min(8, min(most, VMEM_BUDGET // size) // heads))
    return Config(heads=heads, heads_bwd=heads, chunks=chunks, turns=2)


def key_repeats(H: int, HV: int, config: Config) -> int:
    """Return how often to repeat the key heads, so that grid steps of both directions hold whole groups."""
    group = HV // H
    return group // math.gcd(group, config.heads, config.heads_bwd)


def lane_packing(heads: int, group: int, C: int) -> int:
    """Return how many heads lie side by side in the lanes: a power of two that divides the group or is its multiple."""
    p = packed.packing(C, heads)
    while p % group and group % p:
        p //= 2
    return p
