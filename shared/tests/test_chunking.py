"""Cutting tokens into chunks and back."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chunkwise.shared.kernels import chunking
from chunkwise.shared.kernels.chunking import Chunking, num_chunks, stream_masks, varlen_tiles
from chunkwise.shared.testing.inputs import boundaries
from chunkwise.shared.testing.stage_oracle import chunks_of

THOROUGH = dict(test_tables_under_x64=lambda packed: packed)


LENGTHS = st.lists(st.integers(0, 40), min_size=6, max_size=6)
# A fixed number of tokens and sequences, so that the tables compile once.
T, C = 240, 16
LEAST, MOST = np.iinfo(np.int32).min, np.iinfo(np.int32).max


def tokens(B, T, *tail):
    return jnp.asarray(np.random.default_rng(0).standard_normal((B, T, *tail)), jnp.float32)


@pytest.mark.parametrize(("B", "T"), [(1, 1), (2, 15), (1, 16), (3, 33)])
def test_fixed_batch(B, T):
    chunks, x = Chunking(B, T, 16), tokens(B, T, 2, 3)
    cut = chunks.split(x)
    assert B * num_chunks(T, 16) == chunks.NC
    np.testing.assert_array_equal(chunks.merge(cut), x)
    for n, c in enumerate(chunks_of(B, T, 16)):
        length = c.tokens.stop - c.tokens.start
        assert (chunks.sequence[n], chunks.length[n]) == (c.sequence, length)
        assert chunks.first[n] == (c.tokens.start == 0)
        assert chunks.last[n] == (c.tokens.stop == T)
        np.testing.assert_array_equal(cut[n, :, :length], jnp.moveaxis(x[c.row, c.tokens], 0, 1))
        assert not cut[n, :, length:].any()
    assert not chunks.empty.any()


@jax.jit
def tables(x, cu_seqlens):
    chunks = Chunking(1, T, C, cu_seqlens)
    table = {name: getattr(chunks, name) for name in ("sequence", "first", "last", "length", "empty", "final_chunk")}
    return table, chunks.split(x), chunks.split_cumulative(x), chunks.merge(chunks.split(x))


@settings(max_examples=30, deadline=None)
@given(LENGTHS)
def test_packed_batch(lengths):
    x = tokens(1, T, 2)
    end = sum(lengths)
    x = x.at[:, end:].set(jnp.nan)
    table, cut, cumulative, merged = jax.tree.map(np.asarray, tables(x, boundaries(*lengths)))
    expected = chunks_of(1, T, C, np.cumsum([0, *lengths]))
    x = np.asarray(x)
    for n, c in enumerate(expected):
        rows = x[0, c.tokens].T
        assert table["sequence"][n] == c.sequence
        assert table["length"][n] == rows.shape[1]
        np.testing.assert_array_equal(cut[n, :, : rows.shape[1]], rows)
        assert not cut[n, :, rows.shape[1] :].any()
        np.testing.assert_array_equal(cumulative[n], np.pad(rows, [(0, 0), (0, C - rows.shape[1])], mode="edge"))
    sequences = np.array([c.sequence for c in expected], int)
    used = len(expected)
    np.testing.assert_array_equal(np.flatnonzero(table["first"]), np.unique(sequences, return_index=True)[1])
    np.testing.assert_array_equal(table["empty"], np.array(lengths) == 0)
    for n in np.unique(sequences):
        assert table["final_chunk"][n] == np.flatnonzero(sequences == n)[-1]
        assert table["last"][table["final_chunk"][n]]
    assert table["last"].sum() == len(np.unique(sequences))
    # Unused chunks, all padding: zero everywhere, whatever lies in the tokens past the last sequence.
    assert not table["length"][used:].any()
    assert not cut[used:].any()
    assert not cumulative[used:].any()
    assert (np.diff(table["sequence"]) >= 0).all()
    np.testing.assert_array_equal(merged[:, :end], x[:, :end])
    assert not merged[:, end:].any()


def test_constant_gate_stops_at_the_last_valid_row():
    chunks = Chunking(1, 18, 16)
    rows = chunks.gamma_rows(jnp.array([-2.0]))
    np.testing.assert_array_equal(rows[0, 0, 0], -2.0 * np.arange(1, 17))
    np.testing.assert_array_equal(rows[1, 0, 0], [-2.0] + 15 * [-4.0])


def test_no_gate_is_a_gate_of_zero():
    assert not Chunking(1, 18, 16).split_gates(None, 3).any()


@settings(max_examples=30, deadline=None)
@given(LENGTHS)
def test_stream_masks(lengths):
    masks = stream_masks(T, C, boundaries(*lengths))
    owner = np.repeat(np.arange(7), [*lengths, T - sum(lengths)]).reshape(-1, C)
    opening = np.concatenate([owner[:1, 0], owner[:-1, -1]])
    np.testing.assert_array_equal(masks.same, owner[:, :, None] == owner[:, None, :])
    np.testing.assert_array_equal(masks.carried, owner == opening[:, None])
    np.testing.assert_array_equal(masks.ending, owner == owner[:, -1:])
    np.testing.assert_array_equal(masks.through, opening == owner[:, -1])
    np.testing.assert_array_equal(masks.valid, owner < 6)


@settings(max_examples=30, deadline=None)
@given(LENGTHS)
def test_pieces(lengths):
    """Every token of a sequence is in one piece, in order; chunks open and close once.

    States enter and leave once, those of an empty sequence with a piece of its own.
    """
    cuts = boundaries(*lengths)
    p = jax.tree.map(np.asarray, varlen_tiles(T, C, cuts))
    assert len(p.chunk) == T // C + 6
    rows = [(s, c * C + i) for s, c, b, e in zip(p.sequence, p.chunk, p.begin, p.end, strict=True) for i in range(b, e)]
    assert rows == list(zip(np.repeat(np.arange(6), lengths), range(sum(lengths)), strict=True))
    for flags, edges in ((p.first, cuts[:-1]), (p.last, cuts[1:])):
        assert list(p.sequence[flags]) == list(range(6))
        tokens = (p.chunk * C + (p.begin if flags is p.first else p.end))[flags]
        np.testing.assert_array_equal(tokens, edges)
    np.testing.assert_array_equal(p.sequence[p.first & (p.begin == p.end)], np.flatnonzero(np.diff(cuts) == 0))
    for flags in (p.opens, p.closes):
        assert list(p.chunk[flags]) == list(range(T // C))
    assert (np.diff(p.chunk) >= 0).all()
    assert (np.diff(p.sequence) >= 0).all()


@pytest.mark.parametrize("packed", [False, True], ids=["fixed", "packed"])
def test_tables_under_x64(packed):
    """They are int32 and booleans, whatever the modes of JAX: kernels read them from scalar memory."""
    cu_seqlens = boundaries(5, 0, 12) if packed else None
    with jax.enable_x64(True), jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        chunks = Chunking(1, 20, 16, cu_seqlens)
        for name in ("sequence", "length", "final_chunk"):
            assert getattr(chunks, name).dtype == jnp.int32, name
        for name in ("first", "last", "empty"):
            assert getattr(chunks, name).dtype == bool, name
        x = jnp.ones((1, 20, 2, 3), jnp.float32)
        gamma = chunks.gamma_rows(jnp.ones((2,), jnp.float32))
        for y in (chunks.split(x), chunks.merge(chunks.split(x)), chunks.split_cumulative(x), gamma):
            assert y.dtype == jnp.float32
        if packed:
            for table in (varlen_tiles(20, 16, cu_seqlens), stream_masks(20, 16, cu_seqlens)):
                for name, value in table._asdict().items():
                    assert value.dtype in (jnp.int32, bool), name


@pytest.mark.parametrize(
    ("ends", "want"),
    [
        ([0, 3, 3, T], [0, 3, 3, T]),
        ([0, 5, 4, 9], [0, 5, 5, 9]),
        ([-2, T + 1, 7, MOST], [0, T, T, T]),
        ([LEAST, LEAST, 6, LEAST], [0, 0, 6, 6]),
    ],
)
def test_rising(ends, want):
    rising = chunking.rising(jnp.array(ends, jnp.int32), T)
    assert (rising.tolist(), rising.dtype) == (want, jnp.int32)


def test_values_taken_and_put():
    """Places that do not exist give zeros, and are dropped."""
    values, index = jnp.array([5, 6, 7, 8], jnp.int32), jnp.array([2, -1, 0, 4], jnp.int32)
    np.testing.assert_array_equal(chunking.take(values, index), [7, 0, 5, 0])
    np.testing.assert_array_equal(chunking.put(values, index, jnp.array([1, 2, 3, 4], jnp.int32)), [3, 6, 1, 8])
