"""The time of a program on a chip, from the TPU compiler's estimate.

The formula is a fit to kernels of other libraries, whose authors publish their times on real chips.
docs/hardware.md has the points and the fit. The time of a program on the device is

    FACTOR (bundles + cycles of operations outside of kernels) / clock + STEP_US (steps of all grids),

and at least the time to move its bytes. A call that waits for its result takes CALL_MS more.
"""

from chunkwise.shared.chips import Chip

# The rounded results of the fit.
CALL_MS = 0.10
FACTOR = 1.09
STEP_US = 0.35
# The relative error of the formula beside published times: the root of the mean square, and the worst on both sides.
SPREAD = 0.073
WORST = (0.85, 1.16)


def device_ms(chip: Chip, bundles: int, around_cycles: int, grid_steps: int, floor_ms: float = 0.0) -> float:
    """Return the time on the device in ms, without CALL_MS.

    Args:
      chip: the chip.
      bundles: how many instruction bundles all kernels run; a loop counts for every iteration.
      around_cycles: cycles of the operations outside of kernels, from the compiler.
      grid_steps: steps of the grids of all kernels.
      floor_ms: the time in ms to move the bytes of the kernels at peak bandwidth, which is the least time.
    """
    to_ms = lambda cycles: FACTOR * cycles / chip.clock_ghz / 1e6
    return max(to_ms(bundles) + STEP_US * grid_steps / 1e3, floor_ms) + to_ms(around_cycles)
