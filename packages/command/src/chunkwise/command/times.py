"""The time of a program on a chip, from the TPU compiler's estimate.

The formula is a fit to kernels of other libraries, whose authors publish their times on real chips.
docs/hardware.md has the points and the fit. The time of a program on the device is

    FACTOR (bundles + cycles of operations outside of kernels) / clock + STEP_US (steps of all grids),

where a launch of a kernel takes at least the time to move its bytes, and so does the program. A call that waits for its
result takes CALL_MS more.
"""

from collections.abc import Iterable
from typing import NamedTuple

from chunkwise.shared.chips import Chip

# The rounded results of the fit.
CALL_MS = 0.10
FACTOR = 1.09
STEP_US = 0.35
# The relative error of the formula beside published times: the root of the mean square, and the worst on both sides.
SPREAD = 0.073
WORST = (0.85, 1.16)


class Launch(NamedTuple):
    """A launch of a kernel.

    Attributes:
      bundles: how many instruction bundles it runs; a loop counts for every iteration.
      grid_steps: steps of its grid.
      floor_ms: the time in ms to move its bytes at peak bandwidth, which is its least time.
    """

    bundles: int
    grid_steps: int
    floor_ms: float = 0.0


def device_ms(chip: Chip, launches: Iterable[Launch], around_cycles: int, floor_ms: float = 0.0) -> float:
    """Return the time on the device in ms, without CALL_MS.

    Args:
      chip: the chip.
      launches: all launches of kernels.
      around_cycles: cycles of the operations outside of kernels, from the compiler.
      floor_ms: the time in ms to move the bytes of the program at peak bandwidth, the least time of the launches.
    """
    to_ms = lambda cycles: FACTOR * cycles / chip.clock_ghz / 1e6
    times = (max(to_ms(x.bundles) + STEP_US * x.grid_steps / 1e3, x.floor_ms) for x in launches)
    return max(sum(times), floor_ms) + to_ms(around_cycles)
