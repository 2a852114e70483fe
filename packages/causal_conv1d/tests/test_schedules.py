"""Steps of a serving engine over one pool, against the float64 convolution over a dict of windows in plain Python."""

from random import Random

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from chunkwise.causal_conv1d import causal_conv1d_update
from tests.engine import Engine, Oracle, convolution, describe, make_rubbish, make_wrong

T, D, TAPS, N, U, SLOTS, BLOCK = 160, 5, 4, 6, 3, 40, 32
TYPES = (jnp.float32, jnp.bfloat16, jnp.float16)
# The kernel that copies rows of pools takes no float16.
POOLS = [("xla", kind) for kind in TYPES] + [("pallas", kind) for kind in TYPES[:2]]
QUICK = {
    ("xla", jnp.float32, jnp.float32),
    ("pallas", jnp.float32, jnp.float32),
    ("pallas", jnp.bfloat16, jnp.bfloat16),
}
THOROUGH = dict(
    test_schedules=lambda implementation, dtype, pool_dtype: (implementation, dtype, pool_dtype) not in QUICK,
    test_what_does_not_exist_is_none_in_a_step=lambda implementation: implementation == "pallas",
)
RNG = np.random.default_rng(0)
WEIGHT, BIAS = RNG.standard_normal((D, TAPS)).astype(np.float32), RNG.standard_normal(D).astype(np.float32)


def make_step(implementation: str, traces: list):
    """Return a jitted step of tokens, a pool and a schedule, which lists its traces."""

    @jax.jit
    def run(x, pool, schedule):
        traces.append(jax.tree.structure(schedule))
        return causal_conv1d_update(
            x, pool, WEIGHT, BIAS, activation=None, block_size=BLOCK, implementation=implementation, **schedule
        )

    return run


def assert_schedule(run, engine: Engine, steps: int, seed: int, dtype, pool_dtype, given_of) -> None:
    """Compare the steps of an engine with an oracle, over one pool, whose free slots hold what must have no effect.

    A pool of another type than the tokens rounds an input when it is stored, once: it keeps its bits as long as it is
    there, so the oracle takes over what the pool holds. The operator gets what `given_of` makes of a step, and must
    take it for the step.
    """
    rng = np.random.default_rng(seed)
    pool = np.empty((SLOTS, TAPS - 1, D), pool_dtype)
    pool[:] = np.resize(np.array([np.nan, -0.0, np.inf, -1e-40]).astype(pool_dtype), SLOTS)[:, None, None]
    oracle = Oracle(convolution(WEIGHT.astype(np.float64), BIAS.astype(np.float64)), BLOCK, pool)
    # Half a unit in the last place of an output.
    rounding = float(jnp.finfo(dtype).eps) / 2 if dtype != jnp.float32 else 0.0
    for _ in range(steps):
        freed, schedule = engine.step()
        used = int(schedule["cu_seqlens"][schedule["num_sequences"]])
        hypothesis.note(describe(schedule, freed))
        pool = np.array(pool)
        pool[freed] = np.nan
        oracle.states |= {slot: pool[slot].astype(np.float64) for slot in freed}
        x = rng.standard_normal((1, T, D)).astype(dtype)
        x[:, used:] = np.nan
        counts = {name: np.int32(schedule[name]) for name in ("num_decodes", "num_sequences")}
        y, after = jax.device_get(run(x, pool, given_of(schedule | counts)))
        want, written = oracle.run({"x": x}, schedule)
        assert (y.dtype, after.dtype) == (dtype, pool.dtype)
        # Every bit: no value tells zeros apart, nor what is not a number.
        for slot in set(range(SLOTS)) - written:
            assert after[slot].tobytes() == pool[slot].tobytes(), f"slot {slot} has changed"
        for slot in written:
            np.testing.assert_array_equal(after[slot], oracle.states[slot].astype(pool_dtype), f"slot {slot}")
        assert not np.any(y[0, used:])
        if used:
            np.testing.assert_allclose(y[0, :used].astype(np.float64), want, rtol=rounding, atol=1e-5)
        pool = after
        oracle.states |= {slot: pool[slot].astype(np.float64) for slot in written}


def assert_schedules(implementation: str, dtype, pool_dtype, given_of=lambda random, step: step) -> None:
    """Compare many engines, by one program for those that share states and one for the others."""
    traces: list = []
    run = make_step(implementation, traces)

    @hypothesis.settings(max_examples=12, deadline=None, derandomize=True)
    @hypothesis.given(st.randoms(use_true_random=False), st.booleans(), st.integers(1, 14), st.integers(0, 10**6))
    def check(random, shares, steps, seed):
        engine, wrong = Engine(random, T, N, U, SLOTS, BLOCK, shares), Random(seed)
        assert_schedule(run, engine, steps, seed, dtype, pool_dtype, lambda step: given_of(wrong, step))

    check()
    assert len(traces) == len(set(traces)) == 2


@pytest.mark.parametrize(("implementation", "pool_dtype"), POOLS)
@pytest.mark.parametrize("dtype", TYPES)
def test_schedules(implementation, dtype, pool_dtype):
    assert_schedules(implementation, dtype, pool_dtype)


@pytest.mark.parametrize("implementation", ["xla", "pallas"])
def test_what_does_not_exist_is_none_in_a_step(implementation):
    """Slots past the end, counts and boundaries that do not fit: the rest of the step is as if they were right."""
    wrong = lambda random, step: make_wrong(random, step, SLOTS, T)
    assert_schedules(implementation, jnp.float32, jnp.float32, wrong)


@pytest.mark.parametrize("implementation", ["xla", "pallas"])
def test_rubbish_stays_in_the_pool(implementation):
    """Whatever the arrays of a step hold, a slot that they do not name keeps every bit."""
    rng, run = np.random.default_rng(6), make_step(implementation, [])
    for turn in range(12):
        schedule = make_rubbish(Random(turn), N, U, 1, SLOTS, T, with_reads=turn % 2 == 1)
        x, pool = (rng.standard_normal(shape).astype(np.float32) for shape in ((1, T, D), (SLOTS, TAPS - 1, D)))
        y, after = run(x, pool, schedule)
        named = {*schedule["state_indices"].flat, *schedule["block_state_indices"].flat}
        others = np.array([slot for slot in range(SLOTS) if slot not in named])
        np.testing.assert_array_equal(after[others], pool[others])
        assert np.all(np.isfinite(y))
