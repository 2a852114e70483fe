"""What Kimi delta attention costs, for XLA's scheduler, the docstrings and the benchmarks."""

from jax.experimental import pallas as pl

# Exponentials per gate: three levels inside of blocks of 8 rows, from the start of the block and to its end. Larger
# blocks multiply the decays of smaller ones.
_EXPONENTIALS = 5


def cost(
    *, B: int, T: int, H: int, HV: int, K: int, V: int, C: int, itemsize: int = 2, backward: bool = False
) -> pl.CostEstimate:
    """Return what the chunked form costs: the flops of its matrix products, and every array moved once.

    The forward multiplies queries and keys by keys (C K each: every pair of rows belongs to one level), the inverse and
    the scores by values (C V each), and the state by queries, keys and new values (K V each). The backward has two
    products for each of these.

    Args:
      B, T, H, HV, K, V, C: sizes, as in `chunk_kda`; C is the chunk size.
      itemsize: bytes of an element of q, k, v and o; gates and beta have 4.
      backward: of the backward alone instead of the forward.
    """
    tokens = B * T
    keys, values, gates = 2 * H * K * itemsize, 2 * HV * V * itemsize, 4 * HV * (K + 1)
    return pl.CostEstimate(
        flops=(2 if backward else 1) * 2 * tokens * HV * (2 * C * K + 2 * C * V + 3 * K * V),
        transcendentals=_EXPONENTIALS * tokens * HV * K,
        # The backward reads these and writes a gradient for each.
        bytes_accessed=(2 if backward else 1) * tokens * (keys + values + gates),
    )
