"""Serving steps over a pool of states, against the float64 recurrence over a dict of states in plain Python."""

import functools
from random import Random

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import checkify

from chunkwise import pipeline
from chunkwise.fused_gla.operator import GLA, SIMPLE_GLA
from chunkwise.kda.operator import OPERATOR as KDA
from chunkwise.pipeline import check_step, ragged_gated_delta_rule
from chunkwise.shared.testing.inputs import make_inputs
from tests.engine import PREFILLS, Engine, Oracle, describe, make_rubbish, make_wrong
from tests.pool_suite import PREFILL_TOKENS, assert_prefills
from tests.ragged_suite import HV, OPERATORS, K, V, make_tokens, token_of

T, N, SLOTS, BLOCK, CHUNK = 160, 6, 40, 32, 16
IMPLEMENTATIONS = ["xla", "fused"]
# RMS errors over the RMS of the float64 recurrence.
ACCURACY = 2e-6

# Plain JAX of other operators differs in the recurrence alone, which their own tests know. KDA's package has steps of
# its own kernel.
THOROUGH = dict(
    # Decodes and convolutions have them, too.
    test_what_does_not_exist_is_none=True,
    test_rubbish_stays_in_the_pool=True,
    # Prefills over a pool are written once, and steps have pools of the other types.
    test_prefills=lambda operator, dtype, pool, blocks: (
        operator is not KDA or (dtype, pool, blocks) != (jnp.float32, jnp.bfloat16, True)
    ),
)
# All tests of a step run one after another, because there is one at a time.
all_operators = pytest.mark.parametrize("operator", OPERATORS, scope="module")
all_implementations = pytest.mark.parametrize("implementation", [*IMPLEMENTATIONS, "staged"], scope="module")


def drawn(check):
    """Call a function of a random generator, a bool and a seed with a few of them."""
    examples = hypothesis.given(st.randoms(use_true_random=False), st.booleans(), st.integers(0, 10**6))
    return hypothesis.settings(max_examples=12, deadline=None, derandomize=True)(examples(check))


TWO = dict(cu_seqlens=jnp.array([0, 1, 5], jnp.int32), state_indices=jnp.array([1, 0], jnp.int32))


@pytest.mark.parametrize("operator", ["gated_delta_rule", "simple_gla"])
def test_the_number_0_compiles_no_decode(operator):
    """A traced count of 0 does."""
    x, pool = make_tokens(operator, np.random.default_rng(0), 5, 5), jnp.zeros((2, HV, K, V))
    function = getattr(pipeline, f"ragged_{operator}")
    run = lambda decodes: function(**x, states=pool, **TWO, num_decodes=decodes, implementation="fused")
    assert "recurrent_" not in str(jax.make_jaxpr(lambda: run(0))())
    assert "recurrent_" in str(jax.make_jaxpr(run)(jnp.int32(0)))


def test_the_kernels_of_a_step_have_no_gradient():
    x, pool = make_tokens("gated_delta_rule", np.random.default_rng(0), 5, 5), jnp.zeros((2, HV, K, V))
    loss = lambda v: ragged_gated_delta_rule(**x | {"v": v}, states=pool, **TWO, implementation="fused")[0].sum()
    with pytest.raises(NotImplementedError, match="has no derivative"):
        jax.eval_shape(jax.grad(loss), x["v"])


def make_schedule(random: Random, W: int, with_reads: bool = False) -> dict:
    """Return a step of random decodes and prefills; what does not exist holds rubbish."""
    sequences = random.randint(0, N)
    decodes = random.randint(0, sequences)
    lengths = [random.randint(0, W) if n < decodes else random.choice(PREFILLS) for n in range(sequences)]
    while sum(lengths) > T:
        lengths[int(np.argmax(lengths))] //= 2
    if sequences > decodes and random.randrange(2):
        # A prefill ends with the stream, or a token before it.
        lengths[-1] += max(T - sum(lengths) - random.randrange(2), 0)
    rng = np.random.default_rng(random.getrandbits(16))
    # An engine may fill the first entries of an array of zeros.
    cu_seqlens = rng.integers(-5, 400, N + 1, np.int32) * random.randrange(2)
    cu_seqlens[: sequences + 1] = np.cumsum([0, *lengths])
    # The least that is drawn are slots in order, all named and read.
    slots = list(range(SLOTS))
    random.shuffle(slots)
    indices, blocks, shared = np.split(np.array(slots[: N * W + 2 * N + 2], np.int32), [N * W, N * W + 2 * N])
    few = lambda count, percent: np.array([random.randrange(100) >= 100 - percent for _ in range(count)])
    schedule = dict(
        cu_seqlens=cu_seqlens, state_indices=np.where(few(N * W, 15), np.int32(-1), indices).reshape(N, W),
        has_initial_state=~few(N, 30), num_decodes=decodes, num_sequences=sequences,
        num_accepted_tokens=np.array([random.randint(1, W) for _ in range(N)], np.int32),
        block_state_indices=np.where(few(N * 2, 30), np.int32(-1), blocks).reshape(N, 2),
    )  # fmt: skip
    if with_reads:
        schedule["read_indices"] = np.array([random.choice((*shared, -1)) for _ in range(N)], np.int32)
    return schedule


@functools.lru_cache(maxsize=1)
def compiled(operator: str, implementation: str):
    """Return a jitted step and a list with an entry for every time it was traced: the shapes of its arguments.

    The kernels of a step as a CPU interprets them take thousands of maps of memory, of which a process has 65,530.
    """
    traces = []

    def step(tokens, pool, schedule):
        traces.append((pool.dtype, jax.tree.structure(schedule), *(x.shape for x in schedule.values())))
        options = dict(block_size=BLOCK, chunk_size=CHUNK, implementation=implementation)
        return OPERATORS[operator](**tokens, states=pool, **schedule, **options)

    return jax.jit(step, donate_argnums=1), traces


def assert_step(
    operator: str, implementation: str, oracle: Oracle, pool: np.ndarray, schedule: dict, rng, given: dict | None = None
) -> np.ndarray:
    """Compare a step with the oracle, which holds the same states as the pool; return the pool after it.

    `given` is what the operator gets in the place of the schedule, and must take for it.
    """
    sequences = schedule["num_sequences"]
    tokens = make_tokens(operator, rng, T, schedule["cu_seqlens"][sequences])
    step, traces = compiled(operator, implementation)
    given = schedule if given is None else given
    counts = {name: jnp.int32(given[name]) for name in ("num_decodes", "num_sequences")}
    o, after = jax.device_get(step(tokens, pool, given | counts))
    assert len(traces) == len(set(traces))
    want, written = oracle.run(tokens, schedule)
    assert after.dtype == pool.dtype
    # Every bit: no value tells zeros apart, nor what is not a number.
    for slot in set(range(SLOTS)) - written:
        assert after[slot].tobytes() == pool[slot].tobytes(), f"slot {slot} has changed"
    used = len(want)
    assert not np.any(o[0, used:])
    if used:
        assert rms(o[0, :used].astype(np.float64) - want) <= ACCURACY * (1 + rms(want))
    if written:
        named = sorted(written)
        expected = np.stack([oracle.states[slot] for slot in named])
        assert rms(after[named].astype(np.float64) - expected) <= ACCURACY * rms(expected)
    return after


def rms(x: np.ndarray) -> float:
    """Return the root of the mean square."""
    return float(np.sqrt(np.mean(x**2)))


def test_short_schedule():
    """An engine that does all that there is in a few steps, over one pool, whose free slots hold what has no effect."""
    engine, rng = Engine(Random(662), T, N, 3, SLOTS, BLOCK, shares=True), np.random.default_rng(0)
    pool = np.empty((SLOTS, HV, K, V), np.float32)
    pool[:] = np.resize([np.nan, -0.0, np.inf, -1e-40], SLOTS)[:, None, None, None]
    # It never sees the pool again.
    oracle = Oracle(token_of("gated_delta_rule"), BLOCK, pool)
    check = lambda schedule: check_step(**schedule, block_size=BLOCK, num_slots=SLOTS, num_tokens=T)
    checked, (_, traces) = jax.jit(checkify.checkify(check)), compiled("gated_delta_rule", "fused")
    before = len(traces)
    for _ in range(6):
        freed, schedule = engine.step()
        print(describe(schedule, freed))
        pool = np.array(pool)
        pool[freed] = np.nan
        oracle.states |= {slot: pool[slot].astype(np.float64) for slot in freed}
        error, _ = checked(schedule | {name: jnp.int32(schedule[name]) for name in ("num_decodes", "num_sequences")})
        error.throw()
        pool = assert_step("gated_delta_rule", "fused", oracle, pool, schedule, rng)
    assert len(traces) <= before + 1
    assert engine.done == {
        "block kept", "decode from a later column", "prefill from a later column", "prefix shared", "prompt in pieces",
        "rolled back", "slots freed", "waited",
    }  # fmt: skip


@all_implementations
@all_operators
def test_what_does_not_exist_is_none(operator, implementation):
    """Slots past the end, counts and boundaries that do not fit: the rest of the step is as if they were right."""

    @drawn
    def check(random, with_reads, seed):
        schedule = make_schedule(random, 3, with_reads)
        given = make_wrong(random, schedule, SLOTS, T)
        hypothesis.note(f"{describe(schedule)}\ngiven {given}")
        rng = np.random.default_rng(seed)
        pool = rng.standard_normal((SLOTS, HV, K, V)).astype(np.float32)
        assert_step(operator, implementation, Oracle(token_of(operator), BLOCK, pool), pool, schedule, rng, given)

    check()


@all_implementations
@all_operators
def test_rubbish_stays_in_the_pool(operator, implementation):
    """Whatever the arrays hold, a slot that they do not name keeps every bit."""

    @drawn
    def check(random, with_reads, seed):
        schedule = make_rubbish(random, N, 3, 2, SLOTS, T, with_reads)
        hypothesis.note(str(schedule))
        rng = np.random.default_rng(seed)
        pool = rng.standard_normal((SLOTS, HV, K, V)).astype(np.float32)
        step, _ = compiled(operator, implementation)
        _, after = jax.device_get(step(make_tokens(operator, rng, T, T), pool, schedule))
        written = {*schedule["state_indices"].flat, *schedule["block_state_indices"].flat}
        for slot in set(range(SLOTS)) - written:
            assert after[slot].tobytes() == pool[slot].tobytes(), f"slot {slot} has changed"

    check()


@pytest.mark.parametrize("blocks", [False, True])
@pytest.mark.parametrize("pool", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("operator", [KDA, GLA, SIMPLE_GLA], ids=lambda operator: operator.name)
def test_prefills(operator, dtype, pool, blocks):
    """They start from slots of a pool of states and end in them."""
    x = make_inputs(1, PREFILL_TOKENS, 1, 2, 16, 24, dtype=dtype, per_channel=operator is not SIMPLE_GLA)
    if operator is not KDA:
        del x["beta"]
    options = dict(use_qk_l2norm_in_kernel=True) if operator is KDA else {}
    assert_prefills(operator, x, pool, blocks=blocks, chunk_size=16, **options)


# A step that is right: two decodes, one of them speculates, and a prefill that keeps a block.
STEP = dict(
    cu_seqlens=np.array([0, 1, 3, 80], np.int32), state_indices=np.array([[0, 1], [2, 3], [4, 5]], np.int32),
    num_decodes=2, num_sequences=3, num_accepted_tokens=np.array([1, 2, 1], np.int32),
    block_state_indices=np.array([[6], [7], [8]], np.int32), block_size=64,
)  # fmt: skip
ints = lambda *x: np.array(x, np.int32)
WRONG = {
    "rise": dict(cu_seqlens=ints(0, 1, 0, 80)),
    "at most T": dict(cu_seqlens=ints(0, 1, 3, 200)),
    "at most `num_sequences`, and both from 0 to 3; got 3 and 2": dict(num_decodes=3, num_sequences=2),
    "at most 2 tokens, which come first; got 2, and sequence 1 has 3": dict(cu_seqlens=ints(0, 1, 4, 80)),
    r"from 1 to 2; got 3 at \[1\]": dict(num_accepted_tokens=ints(1, 3, 1)),
    "below 40, the number of slots; got 40 for sequence 1": dict(state_indices=ints([0, 1], [2, 40], [4, 5])),
    "only once; got 0 for sequence 0 and for sequence 1": dict(state_indices=ints([0, 1], [2, 0], [4, 5])),
    "got 2, from which sequence 0 starts and which sequence 1 writes": dict(read_indices=ints(2, 2, 4)),
}


@pytest.mark.parametrize("message", WRONG)
def test_wrong_values(message):
    """Values are checked outside of jit, and under jit by checkify."""
    wrong = STEP | WRONG[message]
    check_step(**STEP, num_slots=SLOTS, num_tokens=T)
    with pytest.raises(ValueError, match=message):
        check_step(**wrong, num_slots=SLOTS, num_tokens=T)
    arrays = {name: jnp.asarray(x, jnp.int32) for name, x in wrong.items() if name != "block_size"}
    run = jax.jit(checkify.checkify(lambda arrays: check_step(**arrays, block_size=64, num_slots=SLOTS, num_tokens=T)))
    error, _ = run(arrays)
    with pytest.raises(checkify.JaxRuntimeError, match=message):
        error.throw()


empty = lambda *shape: np.zeros(shape, np.int32)
BUILT = "known when the program is built; got an array"
SHAPES = {
    r"`state_indices` must be int32 of shape \[N\] or \[N, W\] with N = 3": dict(state_indices=empty(2)),
    r"`has_initial_state` must be bool of shape \(3,\); got": dict(has_initial_state=empty(3)),
    r"`num_decodes` must be from 0 to 3; got 4": dict(num_decodes=4),
    r"`num_sequences` must be int32 of shape \(\); got": dict(num_sequences=np.float32(1)),
    "`block_size` and `block_state_indices` must come together": dict(block_size=None),
    "`block_size` must be a multiple of the chunk size 64; got 32": dict(block_size=32),
    f"`block_size` must be a multiple of the chunk size 64, {BUILT}": dict(block_size=np.full((), 64)),
    f"`chunk_size` must be one of .* {BUILT}": dict(chunk_size=np.full((), 64)),
    "`chunk_size` must be one of .*; got 48": dict(chunk_size=48),
    r"`states` must have shape \[slots, HV, K, V\]": dict(states=np.zeros((SLOTS, HV, V, K), np.float32)),
    r"`states` must be float32": dict(states=empty(SLOTS, HV, K, V)),
    r"`read_indices` must be int32 of shape \(3,\); got int32 \(3, 2\)": dict(read_indices=empty(3, 2)),
    r"`num_accepted_tokens` must be int32 of shape \(3,\); got int32 \(\)": dict(num_accepted_tokens=np.int32(1)),
    r"`block_state_indices` must be int32 of shape \(3, 1\); got int32 \(3,\)": dict(block_state_indices=empty(3)),
    r"`block_state_indices` must be int32 of shape \(3, 1\); got int32 \(2, 1\)": dict(block_state_indices=empty(2, 1)),
    r"`cu_seqlens` must be an int32 array \[N \+ 1\]; got None": dict(cu_seqlens=None),
    r"`cu_seqlens` must be int32 of shape \[N \+ 1\]": dict(cu_seqlens=np.zeros(4, np.float32)),
}


def run_step(operator: str, arguments: dict, sizes=(K, V)):
    """Run STEP with other arguments on random tokens, all of which are arrays of numpy."""
    rng, (K, V) = np.random.default_rng(0), sizes
    arguments = dict(states=np.zeros((SLOTS, HV, K, V), np.float32)) | STEP | arguments
    arguments |= make_tokens(operator, rng, T, T, sizes)
    return OPERATORS[operator](**arguments)


@pytest.mark.parametrize("message", SHAPES)
def test_wrong_shapes(message):
    """A wrong shape or type raises before anything runs, also under jit."""
    traced = {name: x for name, x in (STEP | SHAPES[message]).items() if isinstance(x, np.ndarray)}
    given = {name: x for name, x in SHAPES[message].items() if name not in traced}
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(lambda traced: run_step("gated_delta_rule", traced | given), traced)


@pytest.mark.parametrize("operator", OPERATORS)
@pytest.mark.parametrize("message", WRONG)
def test_operators_check_values(operator, message):
    """Outside of jit an operator raises what `check_step` does, before it computes anything."""
    with pytest.raises(ValueError, match=message):
        run_step(operator, WRONG[message])


def test_boundaries_of_sequences_that_do_not_exist():
    """They may be anything, also where values are checked."""
    few = dict(cu_seqlens=np.array([0, 1, 3, 999], np.int32), num_sequences=2)
    jax.eval_shape(lambda: run_step("simple_gla", few))
    with pytest.raises(ValueError, match="rise from 0"):
        jax.eval_shape(lambda: run_step("simple_gla", few | dict(num_sequences=3)))


@pytest.mark.parametrize(("operator", "K"), [("gated_delta_rule", 257), ("kda", 257), ("simple_gla", 2048)])
def test_states_too_large_for_the_kernels(operator, K):
    """As the docstring says; the other implementations take them."""
    sizes = (K, K if operator == "simple_gla" else V)
    run = lambda implementation: jax.eval_shape(lambda: run_step(operator, dict(implementation=implementation), sizes))
    with pytest.raises(NotImplementedError, match='"fused"'):
        run("fused")
    run("xla")
