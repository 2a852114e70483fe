"""The cost of the gated delta rule, for XLA's scheduler, the docstrings and the benchmarks."""

from jax.experimental import pallas as pl


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
