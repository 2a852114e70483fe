"""The decodes of a layer in one launch, and decodes of operators by the same kernel, against float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from chunkwise.shared.call.arguments import Arguments, Options, Slots
from chunkwise.shared.chips import CHIPS
from chunkwise.shared.operator import Operator
from chunkwise.shared.serving.decode import choose, launch
from chunkwise.shared.serving.state_pool import StatePool
from chunkwise.shared.testing.compare import TOLERANCE, assert_close
from chunkwise.shared.testing.inputs import make_inputs, spec
from chunkwise.shared.testing.oracle import reference
from chunkwise.shared.testing.tpu import compile_for, has_libtpu, launches
from tests import decode_suite, rule_suite, traced

# A pool without rings, drafts over the rings with the most operations, and a slot for each token.
QUICK = ("bfloat16", "channels, int8 drafts", "drafts in slots", "two heads in a register")
THOROUGH = dict(
    # A pool with rings has all that one without has.
    test_one_sequence_is_not_finite=lambda ring: not ring,
    test_values=lambda case: case not in QUICK,
    test_rings_of_other_slots=True,
    test_boundaries_and_counts_may_be_anything=True,
    test_operations=lambda most: most not in (2050, 6000),
    test_decode_of_an_operator=lambda delta: not delta,
    test_erase_keys_and_narrow_heads=lambda case: (
        case not in ("comba, drafts in slots", "Mamba-2", "nine drafts, one after the other")
    ),
    test_compiles_erase_keys_and_narrow_heads=lambda case: (
        case not in ("comba, int8 ring", "half a register", "Mamba-2")
    ),
    test_compiles_as_one_launch=lambda case: case not in (*QUICK, "channels, drafts"),
)


# What rings hold of tokens.
RING = ("keys", "writes", "gates")
# Key heads, value heads and what else differs.
CASES = {
    "gated delta rule": (1, 2, dict()),
    "bfloat16": (1, 2, dict(dtype=jnp.bfloat16, pool=jnp.bfloat16, together=True)),
    "channels": (2, 2, dict(per_channel=True, pool=jnp.bfloat16)),
    "bound": (1, 3, dict(per_channel=True, together=True, bias=True)),
    "ring": (2, 4, dict(pool=jnp.bfloat16, ring=True)),
    "float32 ring": (1, 2, dict(ring=True)),
    "channels, ring": (2, 2, dict(per_channel=True, pool=jnp.bfloat16, ring=True)),
    "channels, float32 ring": (1, 1, dict(per_channel=True, ring=True)),
    "int8": (1, 2, dict(pool=jnp.int8)),
    "int8 ring": (2, 4, dict(pool=jnp.int8, ring=True)),
    "channels, int8 ring": (2, 2, dict(per_channel=True, pool=jnp.int8, ring=True)),
    "drafts": (2, 2, dict(pool=jnp.bfloat16, ring=True, tokens=2)),
    "three drafts": (1, 2, dict(ring=True, tokens=3, together=True)),
    "drafts in slots": (1, 2, dict(dtype=jnp.bfloat16, pool=jnp.bfloat16, tokens=3)),
    "int8, drafts in slots": (1, 2, dict(pool=jnp.int8, tokens=2)),
    "channels, drafts in slots": (2, 2, dict(per_channel=True, tokens=2)),
    "channels, drafts": (2, 2, dict(per_channel=True, pool=jnp.bfloat16, ring=True, tokens=3)),
    "two heads in a register": (2, 6, dict(size=64, together=True)),
    "channels, two heads in a register": (4, 4, dict(size=64, per_channel=True, pool=jnp.bfloat16, tokens=2)),
    "channels, int8 drafts": (2, 2, dict(per_channel=True, pool=jnp.int8, ring=True, tokens=2)),
}


@pytest.fixture(autouse=True)
def few_states_a_step(monkeypatch):
    """Let a grid step take some sequences of two value heads, so that there are several, and less to compile."""
    monkeypatch.setattr(launch, "_STATES", 8)


def takes(decodes, conv, pool, slots) -> bool:
    """Return whether the kernel takes decodes of a layer."""
    return choose.by_kernel("fused", decodes, pool, slots, conv=conv)


@pytest.mark.parametrize("case", CASES)
def test_values(case):
    H, HV, options = CASES[case]
    decodes, conv, pool = decode_suite.make(H, HV, **options)
    form = decodes.static.decode_tokens, pool.replay > 0
    assert takes(decodes, conv, pool, decode_suite.slots(*form))
    o, conv_after, after = decode_suite.decode(decodes, conv, pool)
    want_o, want_conv, want = decode_suite.reference(decodes, conv, decode_suite.states_before(decodes, pool))
    # Over a ring a decode goes on from the state that it folds as the pool keeps it.
    kind = pool.states.dtype if pool.replay else o.dtype
    assert_close("o", o, want_o, decode_suite.LIMITS[kind.name])
    assert_close("states", decode_suite.states_after(decodes, after), want, decode_suite.LIMITS[pool.states.dtype.name])
    for have, want in zip(conv_after, want_conv, strict=True):
        np.testing.assert_array_equal(np.where(np.isnan(want), want, np.asarray(have, np.float64)), want)
    untouched = np.setdiff1d(np.arange(pool.shape[0]), decode_suite.written(*form))
    for have, before in zip(jax.tree.leaves(after), jax.tree.leaves(pool), strict=True):
        assert np.asarray(have[untouched]).tobytes() == np.asarray(before[untouched]).tobytes()


def test_rings_of_other_slots():
    """A sequence that starts in another slot than it ends in leaves a state with a ring of one token."""
    decodes, conv, pool = decode_suite.make(1, 2, ring=True)
    read = decode_suite.NAMED.copy()
    read[[0, 5, 7]] = 2, 11, -1
    named = decode_suite.slots()._replace(read_indices=jnp.asarray(read))
    o, _, after = decode_suite.decode(decodes, conv, pool, named=named)
    want_o, _, want = decode_suite.reference(decodes, conv, decode_suite.all_states(pool), read)
    assert_close("o", o, want_o, TOLERANCE["float32"])
    assert_close("states", decode_suite.all_states(after), want, TOLERANCE["float32"])
    # Of twelve sequences these have a token and a slot.
    counts, drafts = decode_suite.COUNTS.copy(), np.minimum(decode_suite.COUNTS, 1)
    for n in (0, 2, 5, 6, 7, 8, 9, 10):
        slot, stays = decode_suite.NAMED[n], read[n] == decode_suite.NAMED[n] and decode_suite.CONTINUES[n]
        counts[slot] = 1 + (counts[slot] % decode_suite.L if stays else 0)
        drafts[slot] = 1
    np.testing.assert_array_equal(after.count, counts)
    np.testing.assert_array_equal(after.drafts, drafts)


@pytest.mark.parametrize("ring", [False, True])
def test_one_sequence_is_not_finite(ring):
    decodes, conv, pool = decode_suite.make(1, 2, ring=ring)
    clean = decode_suite.decode(decodes, conv, pool)
    # The token of the first sequence, a state and the inputs of others, and the slot of one that starts from zeros.
    x = tuple(y.at[0].set(jnp.nan) for y in decodes.x)
    bad = lambda y: y.at[np.array([3, 15])].set(jnp.nan)
    pool = pool._replace(**{name: bad(getattr(pool, name)) for name in ("states", *(RING if ring else ()))})
    o, conv_after, after = decode_suite.decode(decodes._replace(x=x), tuple(map(bad, conv)), pool)
    hit, slots = np.array([0, 2]), np.array([7, 3])
    assert np.isnan(o[hit]).all(axis=1).all()
    states = [decode_suite.all_states(x) for x in (after, clean[2])]
    for have, want, of in ((o, clean[0], hit), (*states, slots), (conv_after[0], clean[1][0], slots)):
        others = np.setdiff1d(np.arange(len(want)), of)
        np.testing.assert_array_equal(have[others], want[others])


@pytest.mark.parametrize(("broken", "ring"), [([5, -3, 2**31 - 1, -(2**31)], False), ([9, 9, 0, 40], True)])
def test_boundaries_and_counts_may_be_anything(broken, ring):
    """A kernel that read past the end of an array would halt its core."""
    decodes, conv, pool = decode_suite.make(1, 2, ring=ring)
    if ring:
        pool = pool._replace(count=jnp.asarray(np.resize([2**31 - 1, -5], decode_suite.SLOTS), jnp.int32))
    boundaries = (broken * 4)[:13]
    slots = decode_suite.slots()._replace(num_decodes=jnp.int32(2**31 - 1), num_sequences=jnp.int32(99))
    o, _, after = decode_suite.decode(decodes, conv, pool, boundaries, slots)
    assert o.shape == (12, 256)
    if ring:
        counts = np.asarray(after.count)
        assert ((counts <= decode_suite.L) | (counts == 2**31 - 1)).all()
    else:
        assert np.isfinite(o).all()
        assert np.isfinite(after.states).all()


# Gates per channel, a delta rule, and the type of the pool.
RULES = [(False, True, jnp.bfloat16), (True, False, jnp.float32)]


@pytest.mark.parametrize(("per_channel", "delta", "dtype"), RULES)
def test_decode_of_an_operator(per_channel, delta, dtype, monkeypatch):
    used = []
    launch_it = launch.launch
    monkeypatch.setattr(launch, "launch", lambda *args: (used.append(args), launch_it(*args))[1])
    x = make_inputs(B=3, T=1, H=1, HV=2, K=128, V=128, per_channel=per_channel)
    x = {name: y for name, y in x.items() if delta or name != "beta"}
    pool = jnp.asarray(np.random.default_rng(1).standard_normal((5, 2, 128, 128)), dtype)
    slots = Slots(jnp.array([4, -1, 0], jnp.int32))
    options = Options(output_final_state=True)
    given = Arguments(**x | dict(initial_state=pool, scale=0.3))._replace(slots=slots)
    o, after = Operator("decode", lambda x, options: None, {}).recurrent(given, options, "fused")
    before = np.asarray(pool, np.float64)[[4, 1, 0]] * np.array([1, 0, 1])[:, None, None, None]
    want_o, want = reference(**x | dict(initial_state=before), scale=0.3)
    assert used
    assert_close("o", o, want_o, TOLERANCE["float32"])
    assert_close("states", after[np.array([4, 0])], want[[0, 2]], TOLERANCE[jnp.dtype(dtype).name])


@pytest.mark.parametrize("case", rule_suite.CASES)
def test_erase_keys_and_narrow_heads(case):
    rule_suite.assert_decodes(case)


def test_what_it_does_not_take():
    decodes, conv, pool = decode_suite.make(1, 2, ring=True)
    slots, plain = decode_suite.slots(), StatePool(pool.states)
    assert not takes(decodes, conv, StatePool(pool.states.astype(jnp.float16)), slots)
    assert not takes(decodes, conv, plain, slots._replace(state_indices=jnp.zeros((12, 3), jnp.int32)))
    other = decodes._replace(static=decodes.static._replace(K=64, H=2))
    assert not takes(other, conv, plain, slots)
    # Decodes of several tokens have several slots of the convolution for a ring.
    wide = tuple(jnp.concatenate([y, y]) for y in conv)
    two = decodes._replace(static=decodes.static._replace(W=2))
    fits = [takes(x, y, pool, slots) for x, y in ((decodes, wide), (two, conv), (two, wide))]
    assert fits == [False, False, True]
    assert not takes(two, conv, plain, slots)


# The most operations of a kernel: an engine compiles some twenty numbers of tokens before it serves.
OPERATIONS = [
    (dict(pool=jnp.bfloat16), 2_050), (dict(pool=jnp.bfloat16, per_channel=True), 2_500), (dict(), 2_750),
    (dict(pool=jnp.bfloat16, ring=True), 5_100), (dict(pool=jnp.int8, ring=True), 6_000),
]  # fmt: skip


@pytest.mark.parametrize(("options", "most"), OPERATIONS)
def test_operations(options, most, monkeypatch):
    monkeypatch.undo()
    decodes, conv, pool = decode_suite.make(2, 4, **options)
    args = jnp.asarray(decode_suite.boundaries()), decode_suite.slots()
    (found,) = traced.launches(lambda *pools: launch.launch(decodes, *pools, *args), conv, pool)
    assert 0.8 * most < found.operations <= most


# Key heads, value heads, other options, and the sequences of a grid step.
STEPS = [
    (2, 4, dict(), 8), (2, 4, dict(pool=jnp.bfloat16), 8), (8, 8, dict(pool=jnp.bfloat16, size=64), 16),
    (16, 32, dict(pool=jnp.bfloat16), 2), (2, 2, dict(), 8), (8, 16, dict(), 2),
]  # fmt: skip


def test_sequences_of_a_grid_step(monkeypatch):
    """There is little to wait for before the first step and after the last one, and few steps have their own cost."""
    monkeypatch.undo()
    found = [launch.sequences_a_step(*decode_suite.make(H, HV, **options), 64) for H, HV, options, _ in STEPS]
    assert found == [n for *_, n in STEPS]


@pytest.mark.tpu
@pytest.mark.skipif(not has_libtpu(), reason="needs libtpu")
@pytest.mark.parametrize("chip", CHIPS)
@pytest.mark.parametrize(
    "case",
    [
        "bfloat16",
        "channels",
        "ring",
        "int8",
        "channels, int8 drafts",
        "channels, drafts",
        "drafts in slots",
        "two heads in a register",
        "channels, two heads in a register",
    ],
)
def test_compiles_as_one_launch(case, chip):
    H, HV, options = CASES[case]
    decodes, conv, pool = decode_suite.make(H, HV, **options)

    def run(arrays, *args):
        return launch.launch(arrays._replace(static=decodes.static), *args)

    arrays = decodes._replace(static=None)
    specs = jax.tree.map(lambda y: spec(*jnp.shape(y), dtype=jnp.result_type(y)), (arrays, conv, pool))
    tokens = decodes.static.decode_tokens
    step = jnp.asarray(decode_suite.boundaries(tokens)), decode_suite.slots(tokens, pool.replay > 0)
    step = jax.tree.map(lambda y: spec(*y.shape, dtype=y.dtype), step)
    program = compile_for(run, *specs, *step, chip=chip, auto_layout=True, donate_argnums=(1, 2))
    assert len(launches(program.as_text())) == 1
    # The pools are updated in place.
    assert program.memory_analysis().temp_size_in_bytes < pool.states.nbytes


@pytest.mark.tpu
@pytest.mark.skipif(not has_libtpu(), reason="needs libtpu")
@pytest.mark.parametrize("chip", CHIPS)
@pytest.mark.parametrize("case", rule_suite.CASES)
def test_compiles_erase_keys_and_narrow_heads(case, chip):
    x, pool, _, slots = rule_suite.make(case)
    step = lambda part, pool, slots: rule_suite.decode(case, part, pool, slots._replace(num_decodes=rule_suite.N))
    args = rule_suite.part_of(x, case, 0), pool, slots._replace(num_decodes=None)
    specs = jax.tree.map(lambda y: spec(*jnp.shape(y), dtype=jnp.result_type(y)), args)
    program = compile_for(step, *specs, chip=chip, auto_layout=True, donate_argnums=(1,))
    assert len(launches(program.as_text())) == 1
    assert program.memory_analysis().alias_size_in_bytes >= pool.states.nbytes
