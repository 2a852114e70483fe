"""From the TPU compiler's estimate of a program to the time that a chip needs for it.

The formula is a fit: `python -m benchmarks calibrate` compiles kernels of other libraries, whose authors publish their
times on real chips, and docs/hardware.md has the points and the fit. The time of a program on the device is

    FACTOR (bundles + cycles of the operations around) / clock + STEP_US (steps of all grids),

and at least what its bytes take. A call that waits for its result takes CALL_MS more.
"""

from chunkwise.shared.chips import Chip

# The fit, rounded.
CALL_MS = 0.10
FACTOR = 1.09
STEP_US = 0.35
# How far the formula is from the published times: the root of the mean square, and the worst on either side.
SPREAD = 0.073
WORST = (0.85, 1.16)


def device_ms(chip: Chip, bundles: int, around_cycles: int, grid_steps: int, floor_ms: float = 0.0) -> float:
    """Return the time on the device, without the waiting of a call.

    Args:
      chip: where it runs.
      bundles: instructions of all kernels, every loop as often as it runs.
      around_cycles: the compiler's cycles of the operations that are no kernels.
      grid_steps: steps of the grids of all kernels.
      floor_ms: the bytes of the kernels at the peak bandwidth of the memory; a kernel takes no less.
    """
    to_ms = lambda cycles: FACTOR * cycles / chip.clock_ghz / 1e6
    return max(to_ms(bundles) + STEP_US * grid_steps / 1e3, floor_ms) + to_ms(around_cycles)
