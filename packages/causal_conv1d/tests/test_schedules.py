"""Steps of a serving engine over one pool, against the float64 convolution over a dict of windows in plain Python."""

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from chunkwise.causal_conv1d import causal_conv1d_update
from tests.engine import Engine, Oracle, convolution, describe

T, D, TAPS, N, U, SLOTS, BLOCK = 150, 5, 4, 6, 3, 40, 64
THOROUGH = dict(test_schedules=lambda implementation, dtype: (implementation, dtype) != ("xla", "float32"))


def assert_schedule(run, weight, bias, engine: Engine, steps: int, seed: int, dtype) -> None:
    """Compare the steps of an engine with an oracle, over one pool, whose free slots hold what must have no effect.

    A pool of another type than the tokens rounds an input when it is stored, once: it keeps its bits as long as it is
    there, so the oracle takes over what the pool holds.
    """
    rng = np.random.default_rng(seed)
    pool = np.empty((SLOTS, TAPS - 1, D), dtype)
    pool[:] = np.resize(np.array([np.nan, -0.0, np.inf, -1e-40]).astype(dtype), SLOTS)[:, None, None]
    oracle = Oracle(convolution(weight.astype(np.float64), bias.astype(np.float64)), BLOCK, pool)
    for _ in range(steps):
        freed, schedule = engine.step()
        used = int(schedule["cu_seqlens"][schedule["num_sequences"]])
        hypothesis.note(describe(schedule, freed))
        pool = np.array(pool)
        pool[freed] = np.nan
        oracle.states |= {slot: pool[slot].astype(np.float64) for slot in freed}
        x = rng.standard_normal((1, T, D)).astype(np.float32)
        x[:, used:] = np.nan
        counts = {name: jnp.int32(schedule[name]) for name in ("num_decodes", "num_sequences")}
        y, after = jax.device_get(run(x, pool, schedule | counts))
        want, written = oracle.run({"x": x}, schedule)
        assert (y.dtype, after.dtype) == (np.float32, pool.dtype)
        # Every bit: no value tells zeros apart, nor what is not a number.
        for slot in set(range(SLOTS)) - written:
            assert after[slot].tobytes() == pool[slot].tobytes(), f"slot {slot} has changed"
        for slot in written:
            np.testing.assert_array_equal(after[slot], oracle.states[slot].astype(dtype), f"slot {slot}")
        assert not np.any(y[0, used:])
        if used:
            np.testing.assert_allclose(y[0, :used], want, rtol=0, atol=1e-5)
        pool = after
        oracle.states |= {slot: pool[slot].astype(np.float64) for slot in written}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("implementation", ["xla", "pallas"])
def test_schedules(implementation, dtype):
    """Many steps of an engine over one pool, by one program for engines that share states and one for the others."""
    rng = np.random.default_rng(0)
    weight, bias = rng.standard_normal((D, TAPS)).astype(np.float32), rng.standard_normal(D).astype(np.float32)
    traces = []

    @jax.jit
    def run(x, pool, schedule):
        traces.append(jax.tree.structure(schedule))
        return causal_conv1d_update(
            x, pool, weight, bias, activation=None, block_size=BLOCK, implementation=implementation, **schedule
        )

    @hypothesis.settings(max_examples=12, deadline=None, derandomize=True)
    @hypothesis.given(st.randoms(use_true_random=False), st.booleans(), st.integers(1, 14), st.integers(0, 10**6))
    def check(random, shares, steps, seed):
        engine = Engine(random, T, N, U, SLOTS, BLOCK, shares)
        assert_schedule(run, weight, bias, engine, steps, seed, jnp.dtype(dtype))

    check()
    assert len(traces) == len(set(traces)) == 2
