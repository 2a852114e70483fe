"""Tile sizes of the kernels, and their cost for XLA's scheduler, the docstrings and the benchmarks."""

from dataclasses import dataclass

from jax.experimental import pallas as pl

from chunkwise.shared import tuning
from chunkwise.shared.kernels import packed

_BUDGET_BYTES = 8 * tuning.VMEM_LIMIT_BYTES // 15
# The budget of a pipeline is larger, because twice as many heads halve the cost of filling and draining it.
_PIPELINE_BUDGET_BYTES = 11 * tuning.VMEM_LIMIT_BYTES // 15
# The most heads that the forward and the backward take at once; a block of more takes them in runs.
RUN, RUN_BWD = 16, 8
# The budget of the smallest possible grid step.
_MOST_BYTES = 4 * tuning.VMEM_LIMIT_BYTES // 5


@dataclass(frozen=True)
class Config:
    """Tile sizes. The bits of the results do not depend on num_steps.

    Attributes:
      heads: value heads of a grid step of the forward, a divisor of HV: whole groups that share a key head, or a part
        of a group. They run in lock-step and hide the latency of one another.
      heads_bwd: the same for the backward.
      num_steps: the most chunks of a grid step; the largest divisor of the number of chunks that does not exceed it is
        taken. The forward keeps one state per grid step for the backward, which recomputes the other states.
    """

    heads: int
    heads_bwd: int
    num_steps: int


def vmem_bytes(
    heads: int, group: int, C: int, K: int, V: int, itemsize: int, per_channel: bool, num_steps: int, bwd: bool
) -> int:
    """Return the bytes of VMEM of a grid step: two buffers of every block, the states, and tiles of the computation."""
    # Gradients of a key head are float32 if several grid steps share the key head.
    keys = 2 * K * (itemsize + bwd * (4 if group > heads else itemsize))
    values = (3 if bwd else 2) * V * itemsize + (4 * K * (1 + bwd) if per_channel else 0)
    blocks = 2 * C * num_steps * (max(heads // group, 1) * keys + heads * values)
    in_flight, run = 6 * C * (C + K + V) * 4, min(heads, max(group, RUN_BWD if bwd and per_channel else RUN))
    if bwd and not per_channel:
        # In a pipeline, tiles of few heads are needed at a time, but the decays of all heads stay.
        resident = (num_steps + 4) * K * V + C * (C + 2 * max(K, V))
        return blocks + heads * 4 * resident + min(heads, 4) * (in_flight + 3 * K * V * itemsize)
    states = (num_steps + 8 if bwd else 5) * K * V * 4
    # Products of float32 operands are split into parts.
    levels = C.bit_length() * C * K * itemsize * (6 if bwd else 4) if per_channel else 0
    return blocks + heads * states + run * (levels + in_flight)


def default_for(H: int, HV: int, K: int, V: int, C: int, NT: int, itemsize: int, per_channel: bool) -> Config | None:
    """Return the Config for these shapes: at least 4 heads if they fit, then up to 512 tokens, then more heads.

    None if one head and one chunk do not fit.
    """
    K, V = packed.pad_channels(K), packed.pad_channels(V)

    def fitting(most: int, bwd: bool) -> int:
        budget = _PIPELINE_BUDGET_BYTES if bwd and not per_channel else _BUDGET_BYTES
        sizes = [n for n in range(1, HV + 1) if tuning.divides_groups(n, H, HV, K, V)]
        need = lambda n: vmem_bytes(n, HV // H, C, K, V, itemsize, per_channel, num_steps, bwd)
        fits = lambda n: need(n) <= (_MOST_BYTES if num_steps == 1 and n == sizes[0] else budget)
        return max((n for n in sizes if n <= max(most, sizes[0]) and fits(n)), default=0)

    num_steps = tuning.largest_divisor(NT, 512 // C)
    while True:
        heads, heads_bwd = fitting(RUN, bwd=False), fitting(RUN_BWD if per_channel else RUN, bwd=True)
        if num_steps == 1 or heads_bwd >= min(HV, 4):
            return Config(heads, heads_bwd, num_steps) if heads and heads_bwd else None
        num_steps = tuning.largest_divisor(NT, num_steps - 1)


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
    # A decay for every pair of tokens; or for every channel, two for the states, and for pairs one inverse, or for
    # products of float32 operands a decay for every level.
    decays = (3 if itemsize == 2 else C.bit_length() + 1) * K if per_channel else C
    return pl.CostEstimate(
        flops=2 * products,
        transcendentals=tokens * (decays if output else K if per_channel else 1),
        bytes_accessed=moved + 4 * tokens * (K if per_channel else 1) * (1 + backward),
    )
