"""Serving steps over pools of 8 bits and over rings, against the float64 recurrence over a dict of states."""

import functools
import re
from random import Random

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec

from chunkwise.pipeline import StatePool, make_pool, pool_formats, ragged_gated_delta_rule, read_states, write_states
from chunkwise.shared.testing.inputs import make_inputs
from tests.engine import Engine, Oracle, describe
from tests.ragged_suite import HV, OPERATORS, PER_CHANNEL, H, K, V, make_tokens, token_of

T, N, W, SLOTS, BLOCK, CHUNK = 160, 6, 3, 24, 32, 16
# RMS errors of the states over the RMS of the float64 recurrence, one step after states that are the same.
ACCURACY = {"float32": 2e-6, "bfloat16": 4e-3, "float16": 5e-4, "int8": 1.2e-2}
# The kernel over a ring goes on from what it has rounded, within a step too; plain JAX from what it rounds.
EXACT = 2e-6
# "staged" hands on the sums of gates of a chunk, which reach -64 here: a state is the exponential of a difference of
# two, each of which is rounded to 4e-6.
STAGED = 8e-6
IMPLEMENTATIONS = ["xla", "fused", "staged"]
POOLS = [(dtype, replay) for dtype in ACCURACY for replay in (0, 8)]
# No TPU kernel takes a pool of float16, or has int8 states of such heads without a ring.
NOT_FUSED = ("float16", 0), ("float16", 8), ("int8", 0)
# The kernel's quick tests are in shared/tests.
all_pools = pytest.mark.parametrize(
    ("implementation", "dtype", "replay"),
    [(name, *pool) for name in IMPLEMENTATIONS for pool in POOLS if name != "fused" or pool not in NOT_FUSED],
)

THOROUGH = dict(
    # The kernel of rings is compared with float64 step by step in `shared`.
    test_short_schedule=True,
    test_a_pool_of_numpy=True,
    # Layers read and write pools with rings.
    test_states_read_and_written=lambda dtype, replay: (dtype, replay) != ("int8", 0),
)


def new_pool(operator: str, dtype: str, replay: int) -> StatePool:
    """Return a pool for an operator."""
    return make_pool(SLOTS, HV, K, V, dtype, replay=replay, H=H, per_channel=operator in PER_CHANNEL)


@pytest.fixture(autouse=True)
def _drop_compiled_programs():
    """Every case has programs of its own; those of all cases are more than one process can hold."""
    yield
    jax.clear_caches()


@functools.cache
def compiled(operator: str, implementation: str, decode_tokens: int | None):
    """Return a jitted step, and a list with an entry for every time it was traced."""
    traces = []

    def step(tokens, pool, schedule):
        traces.append(pool.states.dtype)
        options = {"block_size": BLOCK} if "block_state_indices" in schedule else {}
        options |= dict(chunk_size=CHUNK, decode_tokens=decode_tokens, implementation=implementation)
        return OPERATORS[operator](**tokens, states=pool, **schedule, **options)

    return jax.jit(step, donate_argnums=1), traces


def rms(x) -> float:
    """Return the root of the mean square."""
    return float(np.sqrt(np.mean(np.square(x)))) if np.size(x) else 0.0


def bits(pool: StatePool, slot: int) -> list[bytes]:
    """Return all that a slot holds."""
    return [np.asarray(leaf[slot]).tobytes() for leaf in jax.tree.leaves(pool)]


def spoiled(pool: StatePool, slots) -> StatePool:
    """Return a pool with NaN and numbers of no sense in some slots."""
    fill = lambda x: jnp.nan if jnp.issubdtype(x.dtype, jnp.floating) else 7
    return jax.tree.map(lambda x: x.at[slots].set(fill(x)), pool)


@functools.cache
def drafts_of():
    """Return a jitted function of a pool to the states after every token of the last decodes, [W, slots, ...]."""

    def states(pool: StatePool):
        slots = jnp.arange(SLOTS, dtype=jnp.int32)
        return jnp.stack([read_states(pool, slots, jnp.full(SLOTS, j + 1, jnp.int32)) for j in range(W)])

    return jax.jit(states)


def assert_schedule(operator: str, implementation: str, dtype: str, replay: int, engine: Engine, steps: int, seed: int):
    """Compare the steps of an engine with the oracle, and every bit of the slots that it does not write.

    In a pool of fewer bits every step rounds what it stores: the oracle goes on from there.
    """
    rng, pool = np.random.default_rng(seed), new_pool(operator, dtype, replay)
    oracle = Oracle(token_of(operator), BLOCK, np.zeros((SLOTS, HV, K, V)))
    run, traces = compiled(operator, implementation, W if replay else None)
    before, slots = len(traces), jnp.arange(SLOTS, dtype=jnp.int32)
    for _ in range(steps):
        freed, schedule = engine.step()
        print(describe(schedule, freed))
        if freed:
            # A freed slot may hold anything.
            pool = spoiled(pool, np.array(freed))
        tokens = make_tokens(operator, rng, T, schedule["cu_seqlens"][schedule["num_sequences"]])
        want, written = (oracle.run_ringed if replay else oracle.run)(tokens, schedule)
        held = jax.tree.map(np.array, pool)
        counts = {name: jnp.int32(schedule[name]) for name in ("num_decodes", "num_sequences")}
        o, pool = run(tokens, pool, schedule | counts)
        o, used = np.asarray(o, np.float64)[0], len(want)
        assert not o[used:].any()
        if used:
            limit = ACCURACY[dtype] if replay and implementation != "xla" else EXACT
            assert rms(o[:used] - want) <= limit * (1 + rms(want))
        for slot in set(range(SLOTS)) - written:
            assert bits(pool, slot) == bits(held, slot), f"slot {slot} has changed"
        states = np.asarray(read_states(pool, slots), np.float64)
        if written:
            named = sorted(written)
            expected = np.stack([oracle.states[slot] for slot in named])
            limit = max(ACCURACY[dtype], STAGED if implementation == "staged" else 0.0)
            assert rms(states[named] - expected) <= limit * rms(expected)
        if dtype == "float32":
            continue
        oracle.states = dict(enumerate(states))
        if replay:
            some = np.asarray(drafts_of()(pool), np.float64)
            oracle.drafts = {slot: list(some[: len(held), slot]) for slot, held in oracle.drafts.items()}
    assert len(traces) <= before + 1


@all_pools
@pytest.mark.parametrize("operator", OPERATORS)
def test_short_schedule(operator, implementation, dtype, replay):
    """An engine that does most of what there is, in a few steps."""
    engine = Engine(Random(38), T, N, W, SLOTS, BLOCK, shares=True, ringed=replay > 0)
    assert_schedule(operator, implementation, dtype, replay, engine, 5, 0)


@pytest.mark.parametrize(("dtype", "replay"), POOLS)
def test_states_read_and_written(dtype, replay):
    """States go in and come out, exactly in float32; slots that do not exist are zeros, and are not written."""
    states = np.random.default_rng(0).standard_normal((3, HV, K, V)).astype(np.float32)
    pool = new_pool("kda", dtype, replay)
    after = jax.jit(write_states)(pool, jnp.array([4, -1, 2], jnp.int32), jnp.asarray(states))
    got = read_states(after, jnp.array([4, 2, -1, SLOTS, 0], jnp.int32))
    assert rms(got[:2] - states[[0, 2]]) <= (0.0 if dtype == "float32" else ACCURACY[dtype]) * rms(states)
    assert not got[2:].any()
    for slot in set(range(SLOTS)) - {2, 4}:
        assert bits(after, slot) == bits(pool, slot)


def test_numbers_of_accepted_tokens():
    """A number that cannot be is an error; without a ring a slot has the state of one number, under jit too."""
    ring, slots = new_pool("kda", "float32", 8), np.array([0, 1], np.int32)
    ring = ring._replace(count=ring.count.at[:2].set(5), drafts=ring.drafts.at[:2].set(jnp.array([3, 0])))
    for number in (0, 4):
        with pytest.raises(ValueError, match=rf"from 1 to the tokens .* had, \[3, 0\]; got \[{number}, 0\]\."):
            read_states(ring, slots, np.array([number, 0], np.int32))
    plain = write_states(new_pool("kda", "float32", 0), slots, jnp.ones((2, HV, K, V)))
    with pytest.raises(ValueError, match=r"from 1 to the tokens that a slot without a ring has, \[1, 1\]; got \[1, 2"):
        read_states(plain, slots, np.array([1, 2], np.int32))
    got = jax.jit(read_states)(plain, slots, np.array([1, 2], np.int32))
    assert got[0].all()
    assert not got[1].any()
    with pytest.raises(ValueError, match=r"`num_accepted_tokens` must have a number for each of 2 `slots`; got 1"):
        read_states(plain, slots, slots[:1])
    with pytest.raises(ValueError, match=r"`num_accepted_tokens` must be int32 of shape \[n\]"):
        read_states(plain, slots, 1)


@pytest.mark.parametrize("replay", [0, 8])
def test_a_pool_of_numpy(replay):
    """A file gives arrays of numpy, which a step, a read and a write take outside of jit too."""
    tokens = make_tokens("gated_delta_rule", np.random.default_rng(0), 2, 2)
    run = functools.partial(ragged_gated_delta_rule, **tokens, **STREAM, implementation="xla")
    pool = new_pool("gated_delta_rule", "float32", replay)
    of_numpy, slots = jax.tree.map(np.asarray, pool), np.array([0, 1], np.int32)
    (o, after), (want, expected) = run(states=of_numpy), jax.jit(lambda pool: run(states=pool))(pool)
    assert rms(o - want) <= EXACT * rms(want)
    states = read_states(jax.tree.map(np.asarray, after), slots)
    assert rms(states - read_states(expected, slots)) <= EXACT * rms(states)
    assert not read_states(write_states(of_numpy, slots, np.zeros_like(states)), slots).any()


def test_rows_of_zeros_and_of_tiny_numbers():
    """A row of int8 keeps zeros, and what is far below the smallest normal number does not become NaN."""
    states = np.zeros((1, HV, K, V), np.float32)
    states[0, 0, 0], states[0, 0, 1], states[0, 0, 2, 3] = 1e-42, 1e10, -5.0
    pool = write_states(new_pool("kda", "int8", 0), jnp.zeros(1, jnp.int32), jnp.asarray(states))
    got = np.asarray(read_states(pool, jnp.zeros(1, jnp.int32)))
    assert np.isfinite(got).all()
    assert rms(got - states) <= 1e-2 * rms(states)
    assert got[0, 0, 2, 3] == pytest.approx(-5.0)


STREAM = dict(cu_seqlens=np.array([0, 1, 2], np.int32), state_indices=np.array([0, 1], np.int32), num_decodes=2)
WRONG = {
    "`state_indices` must be int32 of shape [N] with a ring, which holds all tokens of a decode; got (2, 2)": dict(
        state_indices=np.array([[0, 1], [2, 3]], np.int32)
    ),
    "`decode_tokens` must be from 1 to 8, the tokens of the ring; got 9": dict(decode_tokens=9),
    "`decode_tokens` must be from 1 to 8, the tokens of the ring; got 0": dict(decode_tokens=0),
    "`num_decodes` must count sequences of at most 1 tokens": dict(cu_seqlens=np.array([0, 2, 3], np.int32)),
    "`decode_tokens` must be None without a ring; got 2": dict(replay=0, decode_tokens=2),
    "`states.gates` must be float32 (24, 8, 4); got float32 (24, 8, 2, 2, 24)": dict(operator="kda"),
    "`states.keys` must be float32 (24, 8, 2, 24); got float32 (24, 8, 4, 24)": dict(H=4),
}


@pytest.mark.parametrize("message", WRONG)
def test_wrong_steps(message):
    """A pool of other sizes, slots of tokens beside a ring, and decodes that the ring cannot hold."""
    asked = dict(WRONG[message])
    replay, of, heads = asked.pop("replay", 8), asked.pop("operator", ""), asked.pop("H", H)
    pool = make_pool(SLOTS, HV, K, V, replay=replay, H=heads, per_channel=of == "kda")
    tokens = make_tokens("gated_delta_rule", np.random.default_rng(0), T, 3)
    with pytest.raises(ValueError, match=re.escape(message)):
        ragged_gated_delta_rule(**tokens, states=pool, **STREAM | asked)


WRONG_POOLS = {
    "`dtype` must be one of ('float32', 'bfloat16', 'float16', 'int8'); got 'int4'": dict(dtype="int4"),
    "`slots` must be a whole number above 0; got 0": dict(slots=0),
    "`replay` must be a number of tokens, or 0; got -1": dict(replay=-1),
    "`HV` must have a multiple of the heads of `k`; got 4 value heads for 3 key heads": dict(H=3),
    "`per_channel` must be True or False, known when the program is built; got 1": dict(per_channel=1),
}


@pytest.mark.parametrize("message", WRONG_POOLS)
def test_wrong_pools(message):
    with pytest.raises(ValueError, match=re.escape(message)):
        make_pool(**dict(slots=2, HV=HV, K=K, V=V) | WRONG_POOLS[message])


def test_wrong_reads_and_writes():
    pool, slots = new_pool("kda", "int8", 0), jnp.arange(2, dtype=jnp.int32)
    with pytest.raises(ValueError, match="`slots` must be int32 of shape"):
        read_states(pool, slots[None])
    with pytest.raises(ValueError, match="`states` must have shape"):
        write_states(pool, slots, jnp.zeros((2, HV, V, K)))
    with pytest.raises(ValueError, match="`pool` must be a StatePool; got ArrayImpl"):
        read_states(pool.states, slots)


def test_devices():
    """An operator that divides itself over a mesh takes an array."""
    mesh = jax.make_mesh((1,), ("heads",), axis_types=(AxisType.Auto,))
    tokens = make_tokens("gated_delta_rule", np.random.default_rng(0), T, 3)
    pool, heads = new_pool("gated_delta_rule", "float32", 8), PartitionSpec(None, None, "heads")
    with jax.set_mesh(mesh), pytest.raises(ValueError, match="`states` must be an array where the operator divides"):
        ragged_gated_delta_rule(**tokens, states=pool, **STREAM, sharding=heads)


def test_formats():
    """A pool in rows stays in rows, and its step gives the same; shapes lie on the default device."""
    x, pool = make_inputs(T=2, H=1, HV=2, K=4, V=6), make_pool(3, 2, 4, 6, jnp.int8, replay=4, H=1)
    at = dict(cu_seqlens=jnp.array([0, 2]), state_indices=jnp.array([1]))
    formats = pool_formats(pool)
    assert formats == pool_formats(jax.eval_shape(lambda: pool))
    want = jax.jit(ragged_gated_delta_rule)(**x, states=pool, **at)
    step = jax.jit(ragged_gated_delta_rule, donate_argnames="states", out_shardings=(None, formats))
    got = step(**x, states=jax.device_put(pool, formats), **at)
    jax.tree.map(np.testing.assert_array_equal, got, want)
    for y, told in zip(jax.tree.leaves(got[1]), jax.tree.leaves(formats), strict=True):
        assert y.format.layout.major_to_minor == told.layout.major_to_minor == tuple(range(y.ndim))


@pytest.mark.parametrize(("K", "V", "replay", "order"), [(128, 64, 0, (0, 1, 3, 2)), (128, 64, 4, (0, 1, 2, 3))])
def test_formats_of_states_that_lie_transposed(K, V, replay, order):
    """Of the arrays of a pool only states may lie so, and not those over rings."""
    formats = pool_formats(make_pool(3, 128, K, V, replay=replay))
    orders = {name: x.layout.major_to_minor for name, x in formats._asdict().items() if x is not None}
    assert orders.pop("states") == order
    assert all(x == tuple(range(len(x))) for x in orders.values())
