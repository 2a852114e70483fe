"""The cost of gated linear attention, for the launches, the tests of docstrings and the benchmarks."""

from jax.experimental import pallas as pl


def cost(
    *, B: int, T: int, H: int, HV: int, K: int, V: int, C: int, itemsize: int = 2, backward: bool = False,
    per_channel: bool = False, output: bool = True,
) -> pl.CostEstimate:  # fmt: skip
    """Return the cost of one direction of the chunk form: the matrix products, and the bytes of tensors, moved once.

    Args:
      B, T, H, HV, K, V, C: sizes.
      itemsize: bytes of a number of q, k, v and o.
      backward: the cost of the backward, from the states that the forward kept, in place of the forward.
      per_channel: whether gates are per channel of the key; the cost counts their decays, but not their sums.
      output: whether the forward computes the output, or only the states.
    """
    tokens = B * T * HV
    # With gates per channel the scores of every value head differ; otherwise the value heads of a key head share
    # products.
    scores = B * T * (HV if per_channel else H) * C * K
    if backward:
        products = 3 * scores + tokens * (2 * C * V + 5 * K * V)
        moved = itemsize * B * T * (4 * H * K + 3 * HV * V)
    elif output:
        products = scores + tokens * (C * V + 2 * K * V)
        moved = itemsize * B * T * (2 * H * K + 2 * HV * V)
    else:
        products = tokens * K * V
        moved = itemsize * B * T * (H * K + HV * V)
    # A decay for every pair of tokens; or for every channel, a decay for every level of pairs and two for the states.
    decays = (C.bit_length() + 1) * K if per_channel else C
    return pl.CostEstimate(
        flops=2 * products,
        transcendentals=tokens * (decays if output else K if per_channel else 1),
        bytes_accessed=moved + 4 * tokens * (K if per_channel else 1) * (1 + backward),
    )
