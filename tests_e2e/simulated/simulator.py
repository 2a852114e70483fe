"""Kernels on a simulated TPU: a CPU with the memories, copies and semaphores of a TPU, which reports races.

JAX's plain interpretation of kernels does not show such faults: there a copy is done when it begins, and an index past
the end of an array is moved inside.
"""

import contextlib
from collections.abc import Iterator

from jax.experimental.pallas import tpu as pltpu

from chunkwise.shared import compat

_grid_steps: list[tuple[int, ...]] = []


def _record(token, grid_step, core):
    # This is one function for all programs, because it is a part of the key of JAX's caches.
    _grid_steps.append(tuple(int(i) for i in grid_step))
    return token


@contextlib.contextmanager
def simulated(cores: int = 1, **options) -> Iterator[list[tuple[int, ...]]]:
    """Run the kernels of this thread on a simulated TPU; yield the list of the grid steps that they run.

    A race raises an exception, as does an access past the end of an array, and memory that no kernel has written is
    NaN. The steps of a parallel axis come in random order. The switch is a setting of JAX and a part of the key of its
    caches: a function that was traced or compiled outside is traced and compiled again inside, and the other way round.

    The simulator reads a block when its grid step begins, and writes it when its index changes; it does not copy blocks
    ahead of their steps. It does not check the size of fast memory, nor a TPU's rules for shapes. JAX cannot
    rematerialise simulated kernels. A program that is lowered for a TPU inside has simulated kernels too.

    Args:
      cores: TensorCores that share the parallel axes of a grid, each with its fast memory.
      **options: further fields of `pltpu.InterpretParams`, such as `buffer_bounds="padded"`,
        `dma_execution_mode="eager"`, or the `random_seed` of the order of steps.
    """
    params = pltpu.InterpretParams(
        detect_races=True, uninitialized_memory="nan", out_of_bounds_reads="raise", num_cores_or_threads=cores,
        grid_point_recorder=_record, **options,
    )  # fmt: skip
    _grid_steps.clear()
    try:
        with pltpu.force_tpu_interpret_mode(params), compat.races_raised():
            yield _grid_steps
    finally:
        # After an exception in a kernel, its memory is still there.
        pltpu.reset_tpu_interpret_mode_state()
