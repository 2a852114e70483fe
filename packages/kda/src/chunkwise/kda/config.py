"""Tile sizes of the kernels, and their cost for XLA's scheduler, the docstrings and the benchmarks."""

from dataclasses import dataclass

from jax.experimental import pallas as pl

from chunkwise.shared import tuning
from chunkwise.shared.kernels import packed

# Exponentials per gate, in blocks of 8 rows: for three levels, for the start of the block and for its end. The decays
# of larger blocks are products of these.
_EXPONENTIALS = 5


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


def heads_of_tile(H: int, HV: int, C: int, K: int, V: int, *heads: int) -> int:
    """Return how many heads lie side by side in a tile of the kernels, where `heads` are those of grid steps.

    They are two if both fit into the lanes of a register, if their matrices lie side by side, too, and if every head
    has keys of its own.
    """
    fits = H == HV and 2 * max(K, V) <= tuning.LANES and 2 * C <= tuning.LANES
    return 2 if fits and all(n % 2 == 0 for n in (HV, *heads)) else 1


def default_for(H: int, HV: int, C: int, K: int, V: int, itemsize: int, gates: int = 0) -> Config:
    """Return the Config for these shapes, K and V already padded; `gates` counts erase and write gates."""
    m = heads_of_tile(H, HV, C, K, V)
    lanes = [packed.pad_lanes(m * n) // m for n in (K, V)]
    size = vmem_bytes_per_head(C, *lanes, itemsize) + 2 * gates * C * max(lanes) * itemsize
    heads = tuning.pick_heads(HV, H, size, most=16 * m, K=K, V=V)
    size_bwd, limit = size * 5 // 4, tuning.VMEM_LIMIT_BYTES
    heads_bwd = tuning.pick_heads(HV, H, size_bwd, most=16 * m, K=K, V=V)
    # The backward of more than 8 tiles fills the units by itself.
    chunks_bwd = min(32 * m, 5 * limit // 6 // size_bwd) // heads_bwd if heads_bwd <= 8 * m else 1
    return Config(
        heads=heads,
        heads_bwd=heads_bwd,
        chunks=max(1, min(8, min(16 * m, limit // 2 // size) // heads)),
        chunks_bwd=max(1, min(8, chunks_bwd)),
    )


def cost(
    *, B: int, T: int, H: int, HV: int, K: int, V: int, C: int, itemsize: int = 2, backward: bool = False,
    more: int = 0,
) -> pl.CostEstimate:  # fmt: skip
    """Return the cost of the chunk form: the flops of its matrix products, and the bytes of all arrays, moved once.

    The forward multiplies queries and keys by keys (C K each: every pair of rows belongs to one level), the inverse and
    the scores by values (C V each), and the state by queries, keys and new values (K V each). The backward has two
    products for each of these.

    Args:
      B, T, H, HV, K, V, C: sizes, as in `chunk_kda`; C is the chunk size.
      itemsize: bytes of an element of q, k, v and o; gates and beta have 4.
      backward: the cost of the backward alone, in place of the forward.
      more: bytes of further arrays of tokens, such as erase keys and gates, of operators that have them.
    """
    tokens = B * T
    keys, values, gates = 2 * H * K * itemsize, 2 * HV * V * itemsize, 4 * HV * (K + 1)
    return pl.CostEstimate(
        flops=(2 if backward else 1) * 2 * tokens * HV * (2 * C * K + 2 * C * V + 3 * K * V),
        transcendentals=_EXPONENTIALS * tokens * HV * K,
        # The backward reads these arrays and writes a gradient for each.
        bytes_accessed=(2 if backward else 1) * (tokens * (keys + values + gates) + more),
    )


def states_cost(
    *, B: int, T: int, H: int, HV: int, K: int, V: int, C: int, itemsize: int = 2, backward: bool = False,
    more: int = 0,
) -> pl.CostEstimate:  # fmt: skip
    """Return the cost of a launch that only takes states through the tokens, without queries and outputs.

    The forward makes the scores of the keys and multiplies the inverse by values, the state by keys and by new values.
    The backward, which is given scores and inverses, multiplies them by cotangents and values, and the gradient of the
    state by queries, keys, and both these products. `cost` has the same arguments; V counts all channels of the states.
    """
    tokens = B * T
    products = 2 * C * V + 3 * K * V if backward else C * K + C * V + 2 * K * V
    matrices = 3 * C if backward else 0
    return pl.CostEstimate(
        flops=2 * tokens * HV * products,
        transcendentals=(2 if backward else _EXPONENTIALS) * tokens * HV * K,
        bytes_accessed=tokens * ((1 + backward) * H * K * itemsize + HV * (V * itemsize + 4 * (K + 1 + matrices)))
        + more,
    )
