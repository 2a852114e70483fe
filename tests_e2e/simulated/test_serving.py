"""The kernels over pools of states, and the kernels that go token by token, against the float64 recurrence."""

import functools
import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from chunkwise import fused_gdn, fused_gla, kda
from chunkwise.fused_gdn import operator as gdn
from chunkwise.fused_gla import operator as gla
from chunkwise.kda import operator as kda_record
from chunkwise.pipeline import operators
from chunkwise.shared.testing import compare, inputs, oracle
from chunkwise.two_keys import operator as two_keys
from tests import engine, pool_suite, ragged_suite
from tests.recurrence import assert_recurrence

H, HV, K, V = 1, 2, 12, 20
WHOLE = 128  # channels of a head that is a block of its own


@pytest.fixture
def one_head_a_step(monkeypatch):
    """Cut the launches of a step, which takes no tile sizes, into several blocks of heads."""
    monkeypatch.setattr("chunkwise.fused_gdn.config.default_for", lambda *_, **__: fused_gdn.Config(1, 1))
    monkeypatch.setattr("chunkwise.fused_gla.config.default_for", lambda *_, **__: fused_gla.Config(1, 1, 2))
    monkeypatch.setattr("chunkwise.kda.config.default_for", lambda *_, **__: kda.Config(1, 1))


T, BLOCK, SLOTS = 56, 16, 16
# Both prefills that have tokens end blocks, and the tokens from 49 on are padding.
STEP = engine.SEQUENCES | dict(
    cu_seqlens=np.array([0, 1, 3, 3, 19, 49, -7], np.int32),
    block_state_indices=np.array([[1, 1], [1, 1], [-1, -1], [11, -1], [12, 13], [99, 99]], np.int32),
)
# The slots that sequences start from instead: a prefix that two of them share, and zeros.
READ = np.array([4, 14, 9, 14, -1, 99], np.int32)


THOROUGH = dict(
    test_step=True,
    test_slots_and_counts_that_do_not_exist=True,
    test_prefills=True,
    test_prefills_in_pieces_of_two_chunks=lambda operator: operator != "gated_delta_rule",
    test_token_by_token=lambda operator, batch: (operator, batch) != ("recurrent_gla", "pack"),
    test_token_by_token_over_a_pool=lambda operator, batch: (operator, batch) != ("recurrent_kda", "rows"),
)


@pytest.mark.usefixtures("one_head_a_step")
@pytest.mark.parametrize(("start", "cores"), [("accepted", 1), ("read", 2)])
@pytest.mark.parametrize("pool", ["float32", "bfloat16"])
@pytest.mark.parametrize("operator", ragged_suite.NAMES)
def test_step(operator, pool, start, cores):
    """Decodes, speculation and prefills over one pool, whose free slots hold NaN."""
    schedule = STEP | (dict(read_indices=READ) if start == "read" else {})
    assert_step(operator, schedule, schedule, pool)


@pytest.mark.usefixtures("one_head_a_step")
@pytest.mark.parametrize(("start", "cores"), [("accepted", 2), ("read", 1)])
@pytest.mark.parametrize("operator", ragged_suite.NAMES)
def test_slots_and_counts_that_do_not_exist(operator, start, cores):
    """Slots past the end, counts and boundaries that do not fit: the rest of the step is as if they were right."""
    schedule = STEP | (dict(read_indices=READ) if start == "read" else {})
    assert_step(operator, schedule, engine.make_wrong(random.Random(0), schedule, SLOTS, T), "float32")


def assert_step(operator, schedule, given, pool):
    """Compare a step with the float64 recurrence of its schedule; the operator gets `given`, which means the same."""
    rng = np.random.default_rng(2)
    tokens = ragged_suite.make_tokens(operator, rng, T, 49, (WHOLE, WHOLE), (H, HV))
    states = rng.standard_normal((SLOTS, HV, WHOLE, WHOLE)).astype(jnp.dtype(pool))
    states[[5, 11, 12]] = np.nan
    want = engine.Oracle(ragged_suite.token_of(operator), BLOCK, states)
    want_o, written = want.run(tokens, schedule)
    counts = {name: jnp.int32(given[name]) for name in ("num_decodes", "num_sequences")}
    run = functools.partial(ragged_suite.OPERATORS[operator], block_size=BLOCK, chunk_size=16, implementation="fused")
    o, after = jax.jit(run)(**tokens, states=states, **given | counts)
    compare.assert_close("o", o[0, :49], want_o, compare.TOLERANCE["float32"])
    assert not np.asarray(o[0, 49:]).any()
    rounding = {"float32": 0.0, "bfloat16": 4e-3}[pool]
    for slot in range(SLOTS):
        if slot in written:
            limit = max(compare.TOLERANCE["float32"], rounding)
            compare.assert_close(f"slot {slot}", after[slot], want.states[slot], limit)
        else:
            assert np.asarray(after[slot]).tobytes() == states[slot].tobytes(), f"slot {slot} has changed"


PREFILLS = {
    "gated_delta_rule": gdn.OPERATOR, "kda": kda_record.OPERATOR, "gdn2": two_keys.GDN2, "comba": two_keys.COMBA,
    "gla": gla.GLA,
}  # fmt: skip


@pytest.mark.usefixtures("one_head_a_step")
@pytest.mark.parametrize(("blocks", "cores"), [(False, 1), (True, 2)])
@pytest.mark.parametrize("operator", PREFILLS)
def test_prefills(operator, blocks, cores):
    entry = operators.OPERATORS[f"chunk_{operator}"]
    x = entry.source.inputs(1, pool_suite.PREFILL_TOKENS, H, HV, WHOLE, WHOLE)
    pool_suite.assert_prefills(PREFILLS[operator], x, jnp.float32, blocks=blocks, chunk_size=16)


@pytest.mark.parametrize(("operator", "config", "cores"), [
    ("gated_delta_rule", fused_gdn.Config(2, 2, 2), 1), ("kda", kda.Config(2, 2, 2), 2),
])  # fmt: skip
def test_prefills_in_pieces_of_two_chunks(operator, config, cores):
    x = operators.OPERATORS[f"chunk_{operator}"].source.inputs(1, pool_suite.PREFILL_TOKENS, 1, 2, K, V)
    pool_suite.assert_prefills(PREFILLS[operator], x, jnp.float32, chunk_size=16, config=config)


RECURRENT = [entry.name for entry in operators.RECURRENT]
BATCHES = {"rows": ({}, 3, (3, 2)), "pack": (dict(cu_seqlens=inputs.boundaries(1, 0, 3, 1)), 4, (1, 7))}


@pytest.mark.parametrize(("batch", "cores"), [("rows", 2), ("pack", 1)])
@pytest.mark.parametrize("operator", RECURRENT)
def test_token_by_token(operator, batch, cores):
    """The backward is plain JAX, and a program with gradients has the forward of a program without."""
    (sequences, count, sizes), entry = BATCHES[batch], operators.OPERATORS[operator]
    x = entry.source.inputs(*sizes, 2, 4, K, V, num_states=count)
    assert_recurrence(entry.function, x, **sequences, implementation="fused")


@pytest.mark.parametrize(("batch", "cores"), [("rows", 1), ("pack", 2)])
@pytest.mark.parametrize("operator", RECURRENT)
def test_token_by_token_over_a_pool(operator, batch, cores):
    """A sequence whose slot was freed, one of no slot, and slots of no sequence, which are NaN."""
    (sequences, count, sizes), entry = BATCHES[batch], operators.OPERATORS[operator]
    x = entry.source.inputs(*sizes, 2, 4, K, V)
    slots, kept = np.array([4, -1, 2, 6][:count], np.int32), np.array([True, True, False, True][:count])
    pool = np.full((8, 4, K, V), np.nan, np.float32)
    pool[[4, 6]] = np.random.default_rng(2).standard_normal((2, 4, K, V))
    start = np.where((kept & (slots >= 0))[:, None, None, None], pool[slots], 0.0)
    want_o, want = oracle.reference(**x, **sequences, initial_state=start)
    o, after = jax.jit(functools.partial(entry.function, output_final_state=True, implementation="fused"))(
        **inputs.poison_padding(x, **sequences),
        **sequences,
        initial_state=pool,
        state_indices=slots,
        has_initial_state=kept,
    )
    compare.assert_close("o", o, want_o, compare.TOLERANCE["float32"])
    named = slots >= 0
    compare.assert_close("states", after[slots[named]], want[named], compare.TOLERANCE["float32"])
    others = np.setdiff1d(np.arange(8), slots)
    assert np.asarray(after[others]).tobytes() == pool[others].tobytes()
