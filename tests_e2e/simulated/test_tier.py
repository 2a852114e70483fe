"""The simulated TPU finds the mistakes of kernels that are wrong on purpose, and changes nothing outside."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from chunkwise.shared.kernels import launcher
from tests_e2e.simulated import simulator


@pytest.fixture
def simulated_tpu():
    """Simulate nothing: each test of this file says when it simulates."""


def right(x_ref, o_ref, buffer_ref, semaphore):
    copy = pltpu.make_async_copy(x_ref, buffer_ref, semaphore)
    copy.start()
    copy.wait()
    o_ref[...] = buffer_ref[...]


def reads_before_the_wait(x_ref, o_ref, buffer_ref, semaphore):
    copy = pltpu.make_async_copy(x_ref, buffer_ref, semaphore)
    copy.start()
    o_ref[...] = buffer_ref[...]
    copy.wait()


def reads_scratch_before_a_write(x_ref, o_ref, buffer_ref, semaphore):
    o_ref[...] = buffer_ref[...]


def reads_past_the_end(x_ref, o_ref, buffer_ref, semaphore):
    right(x_ref, o_ref, buffer_ref, semaphore)
    o_ref[...] = buffer_ref[pl.ds(pl.program_id(0) + 1, 8)]


def copies_from_past_the_end(x_ref, o_ref, buffer_ref, semaphore):
    right(x_ref.at[pl.ds(pl.program_id(0) + 1, 8)], o_ref, buffer_ref, semaphore)


def writes_past_the_end(x_ref, o_ref, buffer_ref, semaphore):
    right(x_ref, o_ref, buffer_ref, semaphore)
    o_ref[pl.ds(pl.program_id(0) + 8, 8)] = buffer_ref[...]


def launch(kernel, x, grid=(1,), block=lambda i: (0, 0), semantics="arbitrary"):
    """Run a kernel on x [rows, 128] in slow memory with a buffer of 8 rows in fast memory; o is like x."""
    return launcher.pallas_call(
        kernel,
        x,
        name="tier",
        grid=grid,
        dimension_semantics=(semantics,),
        in_specs=[pl.BlockSpec(memory_space=pl.ANY)],
        out_specs=pl.BlockSpec((8, 128), block),
        out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
        scratch_shapes=[pltpu.VMEM((8, 128), jnp.float32), pltpu.SemaphoreType.DMA(())],
        cost_estimate=pl.CostEstimate(flops=0, transcendentals=0, bytes_accessed=0),
    )


X = jnp.arange(8 * 128, dtype=jnp.float32).reshape(8, 128)


def test_a_right_kernel_is_right():
    with simulator.simulated() as grid_steps:
        np.testing.assert_array_equal(launch(right, X), X)
        assert grid_steps == [(0,)]


def test_a_copy_that_is_read_before_the_wait_is_a_race():
    with pytest.raises(RuntimeError, match="RACE DETECTED"), simulator.simulated():
        jax.block_until_ready(launch(reads_before_the_wait, X))
    # Plain interpretation does not see it.
    np.testing.assert_array_equal(launch(reads_before_the_wait, X), X)


def test_cores_that_write_one_block_race():
    """One core runs all steps one after the other."""
    together = lambda: jax.block_until_ready(launch(right, X, grid=(2,), semantics="parallel"))
    with simulator.simulated():
        together()
    with pytest.raises(RuntimeError, match="RACE DETECTED"), simulator.simulated(cores=2):
        together()


def test_scratch_before_a_write_is_nan():
    with simulator.simulated():
        assert np.isnan(launch(reads_scratch_before_a_write, X)).all()


@pytest.mark.parametrize("kernel", [reads_past_the_end, copies_from_past_the_end, writes_past_the_end])
def test_an_index_past_the_end_raises(kernel):
    with pytest.raises(RuntimeError, match="Out-of-bounds"), simulator.simulated():
        jax.block_until_ready(launch(kernel, X))


def test_a_block_past_the_end_raises():
    with pytest.raises(RuntimeError, match="Out-of-bounds"), simulator.simulated():
        jax.block_until_ready(launch(right, X, block=lambda i: (i + 1, 0)))


def test_a_kernel_that_raised_leaves_nothing_behind():
    for kernel in (reads_before_the_wait, reads_past_the_end):
        with pytest.raises(RuntimeError), simulator.simulated():
            jax.block_until_ready(launch(kernel, X))
        test_a_right_kernel_is_right()


def test_programs_inside_and_outside_are_not_taken_for_one_another():
    """A jitted function is traced once outside and once inside, and each place runs its own program from then on."""
    traces = []

    @jax.jit
    def run(x):
        traces.append(x)
        return launch(right, x)

    for _ in range(2):
        with simulator.simulated() as grid_steps:
            np.testing.assert_array_equal(run(X), X)
        assert grid_steps == [(0,)]
        np.testing.assert_array_equal(run(X), X)
        assert grid_steps == [(0,)]
    assert len(traces) == 2
