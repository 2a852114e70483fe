"""What gated linear attention costs: used by the launches, the docstrings' tests and the benchmarks."""

from jax.experimental import pallas as pl


def cost(
    *, B: int, T: int, H: int, HV: int, K: int, V: int, C: int, itemsize: int = 2, backward: bool = False,
    per_channel: bool = False, output: bool = True,
) -> pl.CostEstimate:  # fmt: skip
    """Return what one direction of the chunked form costs: the products it needs, and its tensors moved once.

    Args:
      B, T, H, HV, K, V, C: sizes.
      itemsize: bytes of a number of q, k, v and o.
      backward: the gradients from the states that the forward kept, instead of the forward.
      per_channel: gates per channel of the key instead of per head; their decays are counted, not their sums.
      output: of the forward, whether it computes the output, or the states only.
    """
    tokens = B * T * HV
    # Gates per channel make other scores for every value head; else the heads of a group share their products.
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
    # A decay for every pair of tokens, or one per channel for every level of pairs and two for the states.
    decays = (C.bit_length() + 1) * K if per_channel else C
    return pl.CostEstimate(
        flops=2 * products,
        transcendentals=tokens * (decays if output else K if per_channel else 1),
        bytes_accessed=moved + 4 * tokens * (K if per_channel else 1) * (1 + backward),
    )
