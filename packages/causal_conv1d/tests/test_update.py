"""Decoding: against the convolution of whole sequences, and the pool of states."""

import functools
from random import Random

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from chunkwise.causal_conv1d import causal_conv1d, causal_conv1d_update
from chunkwise.shared.testing.compare import assert_close
from chunkwise.shared.testing.inputs import boundaries
from tests.engine import Oracle, convolution, make_rubbish, make_wrong

B, T, D, W = 3, 9, 5, 4
TYPES = (jnp.float32, jnp.bfloat16, jnp.float16)
# The kernel that copies rows of pools takes no float16.
POOLS = [("xla", kind) for kind in TYPES] + [("pallas", kind) for kind in TYPES[:2]]
QUICK_STEPS = {
    ("xla", jnp.float32, jnp.float32),
    ("pallas", jnp.float32, jnp.float32),
    ("pallas", jnp.bfloat16, jnp.bfloat16),
}
THOROUGH = dict(
    test_serving_steps=lambda implementation, dtype, pool_dtype: (implementation, dtype, pool_dtype) not in QUICK_STEPS,
    test_what_does_not_exist_is_none_in_a_step=lambda implementation: implementation == "pallas",
)


def inputs():
    rng = np.random.default_rng(0)
    draw = lambda *shape: jnp.asarray(rng.standard_normal(shape), jnp.float32)
    return draw(B, T, D), draw(D, W), draw(D), draw(B, W - 1, D)


@pytest.mark.parametrize("tokens", [1, 2, 4])
def test_steps_are_the_convolution(tokens):
    x, weight, bias, state = inputs()
    want, last = causal_conv1d(x, weight, bias, state, True, implementation="xla")
    steps = []
    for t in range(0, T, tokens):
        y, state = causal_conv1d_update(x[:, t : t + tokens], state, weight, bias)
        steps.append(y)
    assert_close("y", jnp.concatenate(steps, axis=1), want, 1e-6)
    np.testing.assert_array_equal(state, last)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_pool(dtype):
    x, weight, bias, state = inputs()
    pool = jnp.asarray(np.random.default_rng(1).standard_normal((6, W - 1, D)), dtype)
    slots = jnp.array([4, -1, 2], jnp.int32)
    y, after = causal_conv1d_update(x[:, :1], pool, weight, bias, state_indices=slots)
    before = jnp.stack([pool[4], jnp.zeros_like(pool[0]), pool[2]])
    want, last = causal_conv1d(x[:, :1], weight, bias, before, True, implementation="xla")
    assert_close("y", y, want, 1e-6)
    assert after.dtype == dtype
    np.testing.assert_array_equal(after[jnp.array([4, 2])], last[jnp.array([0, 2])].astype(dtype))
    np.testing.assert_array_equal(after[jnp.array([0, 1, 3, 5])], pool[jnp.array([0, 1, 3, 5])])


def test_packed_sequences_of_several_lengths():
    x, weight, bias, state = inputs()
    packed, cu_seqlens = x[:1, :6], boundaries(1, 0, 4)
    y, after = causal_conv1d_update(packed, state, weight, bias, cu_seqlens=cu_seqlens)
    want, last = causal_conv1d(packed, weight, bias, state, True, cu_seqlens=cu_seqlens, implementation="xla")
    np.testing.assert_array_equal(y, want)
    np.testing.assert_array_equal(after, last)
    np.testing.assert_array_equal(after[1], state[1])


def test_a_sequence_without_a_state_does_not_read_its_slot():
    x, weight, bias, state = inputs()
    spoilt = state.at[1].set(jnp.nan)
    flags = jnp.array([True, False, True])
    y, after = causal_conv1d_update(x[:, :1], spoilt, weight, bias, has_initial_state=flags)
    want, last = causal_conv1d_update(x[:, :1], state.at[1].set(0.0), weight, bias)
    np.testing.assert_array_equal(y, want)
    np.testing.assert_array_equal(after, last)


def test_negative_slots_repeat_and_change_nothing():
    x, weight, bias, state = inputs()
    slots = jnp.array([-1, -1, -7], jnp.int32)
    _, after = causal_conv1d_update(x[:, :1], state, weight, bias, state_indices=slots)
    np.testing.assert_array_equal(after, state)


def test_a_donated_pool_is_updated_in_place():
    x, weight, bias, _ = inputs()
    pool = jnp.zeros((16, W - 1, D))
    update = jax.jit(causal_conv1d_update, donate_argnums=1)
    text = update.lower(x[:, :1], pool, weight, bias, state_indices=jnp.arange(B, dtype=jnp.int32)).compile().as_text()
    assert "input_output_alias" in text


def test_gradients():
    x, weight, bias, state = inputs()
    loss = lambda f: lambda x, s: sum(jnp.sum(jnp.sin(y)) for y in f(x, s))
    slots = jnp.arange(B, dtype=jnp.int32)
    got = jax.grad(loss(lambda x, s: causal_conv1d_update(x, s, weight, bias, state_indices=slots)), (0, 1))(x, state)
    want = jax.grad(loss(lambda x, s: causal_conv1d(x, weight, bias, s, True, implementation="xla")), (0, 1))(x, state)
    for a, b in zip(got, want, strict=True):
        assert_close("gradient", a, b, 1e-6)


def make_schedule(rng, N: int, U: int, slots: int, with_reads: bool) -> dict:
    """Return a random step of N sequences with at most U tokens of a decode and one block."""
    sequences = int(rng.integers(1, N + 1))
    decodes = int(rng.integers(0, sequences + 1))
    lengths = [int(rng.integers(0, U + 1 if n < decodes else 11)) for n in range(sequences)]
    cu_seqlens = np.full(N + 1, 99, np.int32)
    cu_seqlens[: sequences + 1] = np.cumsum([0, *lengths])
    names = rng.permutation(slots).astype(np.int32)
    schedule = dict(
        cu_seqlens=cu_seqlens,
        state_indices=np.where(rng.random((N, U)) < 0.2, -1, names[: N * U].reshape(N, U)).astype(np.int32),
        has_initial_state=rng.random(N) < 0.7,
        num_decodes=np.int32(decodes),
        num_sequences=np.int32(sequences),
        num_accepted_tokens=rng.integers(1, U + 1, N).astype(np.int32),
        block_state_indices=names[N * U : N * U + N, None],
    )
    return schedule | (dict(read_indices=names[-N:]) if with_reads else {})


@functools.cache
def compiled_step(implementation: str, block: int):
    """Return a jitted step of weights, which are arguments, from a pool and a schedule."""

    def run(x, pool, weight, bias, schedule):
        return causal_conv1d_update(
            x, pool, weight, bias, activation=None, block_size=block, implementation=implementation, **schedule
        )

    return jax.jit(run)


TOKENS, N, U, SLOTS, BLOCK = 40, 4, 3, 40, 8


def draw_step(rng, dtype=jnp.float32, pool_dtype=jnp.float32):
    """Return the tokens of a step and a pool."""
    shapes = ((1, TOKENS, D), dtype), ((SLOTS, W - 1, D), pool_dtype)
    return [rng.standard_normal(shape).astype(kind) for shape, kind in shapes]


def assert_step(implementation: str, rng, with_reads: bool, given_of, dtype=jnp.float32, pool_dtype=jnp.float32):
    """Compare a random step of decodes, speculation, prefills, shared prefixes and blocks with a pool in plain Python.

    The operator gets what `given_of` makes of the step, and must take it for the step.
    """
    _, weight, bias, _ = inputs()
    schedule, (x, pool) = make_schedule(rng, N, U, SLOTS, with_reads), draw_step(rng, dtype, pool_dtype)
    used = schedule["cu_seqlens"][schedule["num_sequences"]]
    x[:, used:] = np.nan
    y, after = compiled_step(implementation, BLOCK)(x, pool, weight, bias, given_of(schedule))
    oracle = Oracle(convolution(np.asarray(weight, np.float64), np.asarray(bias, np.float64)), BLOCK, pool)
    want, _ = oracle.run({"x": x}, schedule)
    assert (y.dtype, after.dtype) == (dtype, pool_dtype)
    # Half a unit in the last place.
    rounding = float(jnp.finfo(dtype).eps) / 2 if dtype != jnp.float32 else 0.0
    np.testing.assert_allclose(np.asarray(y[0, :used], np.float64), want.reshape(-1, D), rtol=rounding, atol=1e-5)
    assert not np.any(y[0, used:])
    states = np.stack([oracle.states[slot] for slot in range(SLOTS)]).astype(pool_dtype)
    np.testing.assert_array_equal(np.asarray(after), states)


@pytest.mark.parametrize("implementation", ["xla", "pallas"])
def test_what_does_not_exist_is_none_in_a_step(implementation):
    """Slots past the end, counts and boundaries that do not fit: the rest of the step is as if they were right."""
    rng = np.random.default_rng(5)
    for turn in range(12):
        wrong = lambda step, turn=turn: make_wrong(Random(turn), step, SLOTS, TOKENS)
        assert_step(implementation, rng, turn % 2 == 1, wrong)


@pytest.mark.parametrize(("implementation", "pool_dtype"), POOLS)
@pytest.mark.parametrize("dtype", TYPES)
def test_serving_steps(implementation, dtype, pool_dtype):
    """An input is rounded to the type of the pool when it is stored, once: it keeps its bits as long as it is there."""
    rng = np.random.default_rng(4)
    for turn in range(4):
        assert_step(implementation, rng, turn % 2 == 1, lambda step: step, dtype, pool_dtype)


@pytest.mark.parametrize("implementation", ["xla", "pallas"])
def test_rubbish_stays_in_the_pool(implementation):
    """Whatever the arrays of a step hold, a slot that they do not name keeps every bit."""
    rng, (_, weight, bias, _) = np.random.default_rng(6), inputs()
    for turn in range(12):
        schedule = make_rubbish(Random(turn), N, U, 1, SLOTS, TOKENS, with_reads=turn % 2 == 1)
        x, pool = draw_step(rng)
        y, after = compiled_step(implementation, BLOCK)(x, pool, weight, bias, schedule)
        named = {*schedule["state_indices"].flat, *schedule["block_state_indices"].flat}
        others = np.array([slot for slot in range(SLOTS) if slot not in named])
        np.testing.assert_array_equal(after[others], pool[others])
        assert np.all(np.isfinite(y))
