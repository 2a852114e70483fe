"""The cost of Kimi delta attention, for XLA's scheduler, the docstrings and the benchmarks."""

from jax.experimental import pallas as pl

# Exponentials per gate, in blocks of 8 rows: for three levels, for the start of the block and for its end. The decays
# of larger blocks are products of these.
_EXPONENTIALS = 5


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
