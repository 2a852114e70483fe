"""Times on a TPU: of a call on the device, of a grid step that does nothing, and the clock.

A grid step takes some time in addition to its instructions, and the clock of a TPU under load is not published. The
formula of `chunkwise.command.times` needs both.
"""

import functools
import tempfile
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.profiler import ProfileData

# Times of two sizes are subtracted, so that the overhead of a call is not in the difference.
STEPS = (1_000, 11_000)
TURNS = (10_000, 1_010_000)
# An iteration of the loop has CHAIN dependent steps, for which the compiler of every generation has BUNDLES_OF_A_TURN
# bundles.
CHAIN = 32
BUNDLES_OF_A_TURN = 97
CALLS = 5


def empty_steps(steps: int) -> Callable:
    """Return a function of an array [8, 128] whose kernel does nothing in `steps` grid steps."""
    block = pl.BlockSpec((8, 128), lambda i: (0, 0))
    shape = jax.ShapeDtypeStruct((8, 128), jnp.float32)

    def body(x_ref, y_ref):
        @pl.when(pl.program_id(0) == 0)
        def _():
            y_ref[...] = x_ref[...]

    return pl.pallas_call(body, name="empty_steps", grid=(steps,), in_specs=[block], out_specs=block, out_shape=shape)


def straight_loop(turns: int) -> Callable:
    """Return a function of an int32 array [1] whose kernel runs a chain of operations `turns` times in a loop."""
    scalar = pl.BlockSpec(memory_space=pltpu.SMEM)

    def turn(_, x):
        for _ in range(CHAIN):
            x = (x ^ (x << 1)) + 1
        return x

    def body(x_ref, y_ref):
        y_ref[0] = jax.lax.fori_loop(0, turns, turn, x_ref[0])

    shape = jax.ShapeDtypeStruct((1,), jnp.int32)
    return pl.pallas_call(body, name="straight_loop", in_specs=[scalar], out_specs=scalar, out_shape=shape)


def module_ms(profile: ProfileData) -> list[float]:
    """Return the times on a TPU of the programs that a profile saw, in ms; none if it saw no TPU."""
    return [
        event.duration_ns / 1e6
        for plane in profile.planes
        if plane.name.startswith("/device:TPU")
        for line in plane.lines
        if line.name == "XLA Modules"
        for event in line.events
    ]


def device_ms(call: Callable, calls: int = CALLS) -> float | None:
    """Return the median time in ms of a call on the device, from the profiler; None if it has none, as on a CPU."""
    with tempfile.TemporaryDirectory(prefix="chunkwise_profile_") as folder:
        with jax.profiler.trace(folder):
            for _ in range(calls):
                jax.block_until_ready(call())
        times = sorted(
            ms for path in Path(folder).rglob("*.xplane.pb") for ms in module_ms(ProfileData.from_file(str(path)))
        )
    return times[len(times) // 2] if times else None


def _difference_ms(make: Callable[[int], Callable], sizes: tuple[int, int], x: jax.Array) -> float | None:
    """Return by how many ms on the device the larger of two sizes takes longer."""
    times = []
    for size in sizes:
        program = jax.jit(make(size)).lower(x).compile()
        jax.block_until_ready(program(x))
        times.append(device_ms(functools.partial(program, x)))
    less, more = times
    return None if less is None or more is None else more - less


def measure() -> dict[str, float | None]:
    """Return `step_us` and `clock_ghz` of this machine's TPU; None off a TPU."""
    found: dict[str, float | None] = {"step_us": None, "clock_ghz": None}
    if jax.default_backend() != "tpu":
        return found
    if ms := _difference_ms(empty_steps, STEPS, jnp.zeros((8, 128), jnp.float32)):
        found["step_us"] = 1e3 * ms / (STEPS[1] - STEPS[0])
    if ms := _difference_ms(straight_loop, TURNS, jnp.zeros(1, jnp.int32)):
        found["clock_ghz"] = BUNDLES_OF_A_TURN * (TURNS[1] - TURNS[0]) / ms / 1e6
    return found
