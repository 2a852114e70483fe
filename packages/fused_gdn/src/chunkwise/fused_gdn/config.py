"""Tile sizes of the kernels, and their cost for XLA's scheduler, the docstrings and the benchmarks."""

import math
from dataclasses import dataclass

from jax.experimental import pallas as pl

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
      turns: the chunks that a grid step takes where `chunks` is 1, each while the one before ends, over rows that are
        one sequence of whole grid steps. A grid step takes a time of its own, so fewer of them are faster.
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
    heads = tuning.pick_heads(HV, H, size, min(32, max(1, HV // compat.cores())), VMEM_BUDGET, K, V, True)
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


def cost(
    *, B: int, T: int, H: int, HV: int, K: int, V: int, C: int, itemsize: int = 2, backward: bool = False
) -> pl.CostEstimate:
    """Return the cost of the chunk form: the flops of its matrix products, and the bytes of all arrays, moved once.

    The forward multiplies queries and keys by keys (C K each), the inverse and the scores by values (C V each), and the
    state by queries, keys and new values (K V each). The backward has two products for each of these.

    Args:
      B, T, H, HV, K, V, C: sizes, as in `chunk_gated_delta_rule`; C is the chunk size.
      itemsize: bytes of an element of q, k, v and o; gates and beta have 4.
      backward: the cost of the backward alone, in place of the forward.
    """
    times = 2 if backward else 1
    keys, values, gates = 2 * H * K * itemsize, 2 * HV * V * itemsize, 2 * 4 * HV
    return pl.CostEstimate(
        flops=times * 2 * B * T * HV * (2 * C * K + 2 * C * V + 3 * K * V),
        # The decays between all rows of a chunk, from its start to every row, and from every row to its end.
        transcendentals=B * T * HV * (C + 2),
        # The backward reads these arrays and writes a gradient for each.
        bytes_accessed=times * B * T * (keys + values + gates),
    )


def states_cost(
    *, B: int, T: int, H: int, HV: int, K: int, V: int, C: int, itemsize: int = 2, backward: bool = False
) -> pl.CostEstimate:
    """Return the cost of a launch that only takes states through the tokens.

    The forward, which is given the inverse, multiplies it by values, and the state by keys and by new values; it writes
    new values in float32 and the states. The backward makes the scores of queries and multiplies scores and inverse by
    cotangents, and the gradient of the state by queries, keys, and both these products. `cost` has the same arguments.
    """
    states, inverse = K * V * itemsize // C, 4 * C
    keys, values = (2 * K, V * itemsize) if backward else (K, V * (itemsize + 4) + states)
    return pl.CostEstimate(
        flops=2 * B * T * HV * (C * K + 2 * C * V + 3 * K * V if backward else C * V + 2 * K * V),
        transcendentals=(C + 2 if backward else 2) * B * T * HV,
        bytes_accessed=B * T * (H * keys * itemsize + HV * (values + inverse + 8)),
    )
