"""The tile size of kernels that are cut by heads alone."""

from dataclasses import dataclass

from chunkwise.shared.kernels import launcher


@dataclass(frozen=True)
class HeadConfig:
    """How a launch over chunks and heads is cut.

    Attributes:
      heads: value heads a grid step. Heads run in lock-step, so more of them hide the latency of one another.
    """

    heads: int


def choose_heads(H: int, HV: int, bytes_per_head: int, most: int, per_channel: bool = False) -> HeadConfig:
    """Return the heads a grid step for HV value heads on H key heads.

    Args:
      H, HV: key heads and value heads.
      bytes_per_head: VMEM that one value head takes.
      most: the largest number of heads for gates per head. Gates per channel are six times the work a head, so a step
        takes at most two heads then.
      per_channel: whether gates are per channel of the key.
    """
    return HeadConfig(heads=launcher.pick_heads(HV, H, bytes_per_head, most=2 if per_channel else most))
