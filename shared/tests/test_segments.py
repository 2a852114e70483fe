"""Segments: how ids tell them, and what an implementation that knows of none makes of them."""

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from chunkwise.shared.call.arguments import Arguments
from chunkwise.shared.kernels.chunking import valid_tokens
from chunkwise.shared.kernels.spans.segment_tables import coded_owners, find_segments, runs
from chunkwise.shared.plain.recurrence import recurrence
from chunkwise.shared.plain.segments import nonfinite_segments, run_segments
from chunkwise.shared.testing.compare import TOLERANCE, assert_close
from chunkwise.shared.testing.inputs import boundaries, make_inputs
from chunkwise.shared.testing.oracle import reference
from tests.segment_suite import SEGMENT_IDS, assert_segments

IDS = st.lists(st.lists(st.integers(-2, 2), min_size=7, max_size=7), min_size=2, max_size=2)


def test_a_segment_begins_where_the_id_changes():
    ids = jnp.asarray([[-1, 4, 4, 4, 2, 2, -3, 2], [0, 0, 1, 0, 0, -1, -1, -1]], jnp.int32)
    segments = find_segments(ids)
    np.testing.assert_array_equal(segments.owner, [[0, 0, 0, 0, 1, 1, 1, 2], [0, 0, 1, 2, 2, 2, 2, 2]])
    np.testing.assert_array_equal(segments.valid, ids >= 0)
    assert np.argwhere(segments.begins).tolist() == [[0, 4], [0, 7], [1, 2], [1, 3]]


def test_runs_of_equal_ids():
    start, final = runs(jnp.asarray([[3, 3, 1, 3, 3], [0, 0, 0, 0, 0]], jnp.int32))
    np.testing.assert_array_equal(start, [[0, 0, 2, 3, 3], [0] * 5])
    np.testing.assert_array_equal(final, [[1, 1, 2, 4, 4], [4] * 5])


def test_a_long_row_is_scanned_in_blocks():
    """A TPU compiles the scans of a million tokens in seconds; the last block is cut short."""
    T = 33 * 1024 + 7
    ids = np.random.default_rng(0).integers(0, 2, T).astype(np.int32)
    change = np.flatnonzero(np.diff(ids)) + 1
    which = np.repeat(np.arange(len(change) + 1), np.diff([0, *change, T]))
    np.testing.assert_array_equal(find_segments(jnp.asarray(ids[None])).owner[0], which)
    start, final = runs(jnp.asarray(ids[None]))
    np.testing.assert_array_equal(start[0], np.array([0, *change])[which])
    np.testing.assert_array_equal(final[0], np.array([*change, T])[which] - 1)


def test_owners_mark_padding_by_their_complement():
    ids = jnp.asarray([[-1, 3, -1, 5]], jnp.int32)
    np.testing.assert_array_equal(coded_owners(None, ids, 4), [[~0, 0, ~0, 1]])
    np.testing.assert_array_equal(coded_owners(boundaries(1, 0, 2), None, 5), [[0, 2, 2, ~2, ~2]])


def test_valid_tokens():
    assert valid_tokens(None, None, 3) is None
    np.testing.assert_array_equal(valid_tokens(boundaries(1, 1), None, 3), [[True, True, False]])
    np.testing.assert_array_equal(valid_tokens(None, jnp.asarray([[0, -1]], jnp.int32), 2), [[True, False]])


@settings(max_examples=25, deadline=None)
@given(IDS, st.integers(0, 1), st.integers(0, 6))
def test_whole_segments_are_spoilt(ids, row, token):
    ids = np.asarray(ids, np.int32)
    x = jnp.zeros((2, 7, 3)).at[row, token, 1].set(jnp.inf)
    segments = find_segments(jnp.asarray(ids))
    found = np.asarray(nonfinite_segments((x, jnp.ones((2, 7))), None, None, segments))
    owner = np.asarray(segments.owner)
    want = (owner == owner[row, token]) & (np.arange(2)[:, None] == row) & (ids[row, token] >= 0)
    np.testing.assert_array_equal(found, want)


def test_states_spoil_the_first_and_the_last_segment():
    segments = find_segments(jnp.asarray([[1, 1, 2, 2, 3], [1, 1, 1, 1, -1]], jnp.int32))
    clean, bad = jnp.ones((2, 1, 2, 2)), jnp.ones((2, 1, 2, 2)).at[0, 0, 1, 1].set(jnp.nan)
    first, last = (nonfinite_segments((jnp.ones((2, 5)),), *x, segments) for x in ((bad, clean), (clean, bad)))
    assert np.argwhere(first).tolist() == [[0, 0], [0, 1]]
    assert np.argwhere(last).tolist() == [[0, 4]]


def plain(x: Arguments):
    """The recurrence, which knows no segments."""
    return recurrence(x.q, x.k, x.v, x.g, x.beta, x.scale, x.initial_state, jnp.float32)


@jax.jit
def run(x, segment_ids):
    o, state = run_segments(plain, Arguments(**x, scale=jnp.float32(0.25), segment_ids=segment_ids))
    return dict(o=o, final_state=state)


def inputs():
    return make_inputs(*SEGMENT_IDS.shape, 2, 2, 16, 4, num_states=len(SEGMENT_IDS))


def test_values_and_gradients():
    assert_segments(run, inputs())


def test_what_is_not_finite_is_not_hidden():
    """Results of a spoilt segment are NaN; where a cotangent is not finite, the gradient of v says so."""
    x, ids = inputs(), jnp.asarray(SEGMENT_IDS)
    segment = SEGMENT_IDS == 3
    dirty = x | {
        "k": x["k"].at[0, 20, 0, 0].set(jnp.nan),
        "initial_state": x["initial_state"].at[1, 0, 1, 1].set(jnp.inf),
    }
    got = run(dirty, ids)
    clean, state = reference(**x, scale=0.25, segment_ids=SEGMENT_IDS)
    spoilt = segment | (SEGMENT_IDS == 1)
    assert np.isnan(np.asarray(got["o"])[spoilt]).all()
    np.testing.assert_allclose(np.asarray(got["o"])[~spoilt], clean[~spoilt], atol=1e-6)
    np.testing.assert_allclose(got["final_state"], state, atol=1e-6)
    results, pull = jax.vjp(lambda x: run(x, ids), x)
    cotangents = jax.tree.map(jnp.ones_like, results)
    bad = cotangents | {"o": cotangents["o"].at[0, 20, 0, 0].set(jnp.nan)}
    wrong, right = pull(bad)[0], pull(cotangents)[0]
    assert np.isnan(wrong["v"][0, 20, 0, 0])
    np.testing.assert_allclose(np.asarray(wrong["v"])[~segment], np.asarray(right["v"])[~segment], atol=1e-6)
    bad = cotangents | {"final_state": cotangents["final_state"].at[0, 0, 0, 0].set(jnp.nan)}
    wrong = pull(bad)[0]["v"]
    assert np.unique(SEGMENT_IDS[np.isnan(np.asarray(wrong)).any(axis=(2, 3))]).tolist() == [9]


def test_forward_mode_is_the_derivative():
    """Results are linear in v, apart from what the initial states add: along v itself they change by their own part."""
    x = inputs()
    values, tangents = jax.jvp(lambda v: run(x | {"v": v}, jnp.asarray(SEGMENT_IDS)), (x["v"],), (x["v"],))
    expected = reference(**x, scale=0.25, segment_ids=SEGMENT_IDS)
    of_states = reference(**x | {"v": 0.0 * x["v"]}, scale=0.25, segment_ids=SEGMENT_IDS)
    for name, want, constant in zip(("o", "final_state"), expected, of_states, strict=True):
        assert_close(name, values[name], want, TOLERANCE["float32"])
        assert_close(f"tangent of {name}", tangents[name], want - constant, TOLERANCE["float32"])
