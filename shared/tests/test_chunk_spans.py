"""The spans of fused kernels and their tables in scalar memory, against a plain loop."""

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from chunkwise.shared import tuning
from chunkwise.shared.kernels.spans import chunk_spans
from chunkwise.shared.testing.inputs import boundaries

LENGTHS = st.lists(st.integers(0, 40), min_size=6, max_size=6)
# A fixed number of tokens and sequences, so that the tables compile once; the last chunk is cut short.
T, C, N = 245, 16, 6
NT = -(-T // C)


def read(span, *names):
    """Return these attributes of a span as a dict of numbers."""
    return {name: int(getattr(span, name)) for name in names}


def read_chunks(table, B: int, T: int, C: int):
    """Return every chunk of B rows of T tokens as a dict of numbers, read as a kernel does."""
    names, chunks = ("chunk", "first", "last", "begin", "end", "before", "final", "mixed"), -(-T // C)
    rows = (chunk_spans.Span(jnp.int32(0), T, C, np.asarray(table), b * (chunks + 1)) for b in range(B))
    return [read(row.of_chunk(jnp.int32(n)), *names) for row in rows for n in range(chunks)]


def test_rows_of_one_sequence_have_no_table():
    assert chunk_spans.make_spans(18, 16, None, True) == (None, None)
    row = chunk_spans.Span(jnp.int32(0), 18, 16)
    found = [read(row.of_chunk(jnp.int32(n)), "chunk", "first", "last", "begin", "end") for n in range(2)]
    assert found == [
        dict(chunk=0, first=1, last=0, begin=0, end=18),
        dict(chunk=1, first=0, last=1, begin=0, end=2),
    ]


stream = jax.jit(lambda cu_seqlens: chunk_spans.make_spans(T, C, cu_seqlens, False))
in_pieces = jax.jit(lambda cu_seqlens: chunk_spans.make_spans(T, C, cu_seqlens, True))


@settings(max_examples=25, deadline=None)
@given(LENGTHS)
def test_steps_of_a_stream(lengths):
    """Every chunk is a span; its owners, and those before it and at its end, tell how sequences lie in it."""
    table, codes_of_chunks = stream(boundaries(*lengths))
    used = sum(lengths)
    owner = np.append(np.repeat(np.arange(N), lengths), np.full(NT * C - used, N - 1))
    codes = np.where(np.arange(NT * C) < used, owner, ~owner)
    np.testing.assert_array_equal(np.asarray(codes_of_chunks).reshape(-1), codes)
    for n, span in enumerate(read_chunks(table, 1, T, C)):
        mine, before = owner[n * C : (n + 1) * C], owner[max(n * C - 1, 0)]
        assert (span["before"], span["final"]) == (before, mine[-1])
        assert span["mixed"] == (before != mine[-1] or (n + 1) * C > used)
        assert (span["chunk"], span["first"], span["last"]) == (n, n == 0, n == NT - 1)


def test_steps_of_segments():
    """Every row has its own segments. Padding counts to the segment before it, and begins no other."""
    ids = jnp.asarray([[-1, 7, 7, 2, -1, 2, 2, 2, -1], [4, 4, 4, 4, 4, 4, 4, 4, 9]], jnp.int32)
    table, found = chunk_spans.make_spans(9, 4, None, True, ids)
    owner = [[~0, 0, 0, 1], [~1, 2, 2, 2], [~2] * 4, [0] * 4, [0] * 4, [1, ~1, ~1, ~1]]
    np.testing.assert_array_equal(found[:, 0], owner)
    columns = ("before", "final", "mixed", "first", "last")
    assert [tuple(span[name] for name in columns) for span in read_chunks(table, 2, 9, 4)] == [
        (0, 1, 1, 1, 0), (1, 2, 1, 0, 0), (2, 2, 1, 0, 1),
        (0, 0, 0, 1, 0), (0, 0, 0, 0, 0), (0, 1, 1, 0, 1),
    ]  # fmt: skip


@settings(max_examples=25, deadline=None)
@given(LENGTHS)
def test_steps_of_pieces(lengths):
    """A span holds rows of one sequence; a sequence begins and ends in one span each; so does every chunk."""
    table, owner = in_pieces(boundaries(*lengths))
    assert owner is None
    names = "sequence", "chunk", "begin", "end", "first", "last", "opens", "closes", "unowned"
    pieces = [read(chunk_spans.Piece(np.asarray(table), n, C), *names) for n in range(table.shape[1])]
    seen, chunk, open_sequence = [], -1, None
    for span in pieces:
        assert span["opens"] == (span["chunk"] != chunk)
        chunk = span["chunk"]
        assert span["unowned"] == ((chunk + 1) * C > sum(lengths))
        rows = range(span["begin"], span["end"])
        if span["first"]:
            assert open_sequence is None
            open_sequence = span["sequence"]
        if rows:
            assert open_sequence == span["sequence"]
        seen += [(span["sequence"], chunk * C + row) for row in rows]
        if span["last"]:
            open_sequence = None
    assert open_sequence is None
    assert seen == list(zip(np.repeat(np.arange(N), lengths), range(sum(lengths)), strict=True))
    assert sum(span["opens"] for span in pieces) == sum(span["closes"] for span in pieces) == NT


def test_rows_and_columns_of_a_piece():
    """Rows 18 to 20 of a span of several chunks of 8 are rows 2 to 4 of its third chunk."""
    span = chunk_spans.Piece(np.array([[0], [0], [18 | 21 << 13]], np.int32), 0, 8).of_chunk(jnp.int32(2))
    inside = [False, False, True, True, True, False, False, False]
    assert span.rows(8).shape == (8, 1)
    np.testing.assert_array_equal(span.rows(8)[:, 0], inside)
    assert span.columns(8).shape == (1, 8)
    np.testing.assert_array_equal(span.columns(8)[0], inside)


def test_limits():
    """They are the largest tables that fit."""
    assert chunk_spans.limit_of_chunks(1, 245_759 * 64, 64) is None
    assert "room for 245760; got 245761: use fewer" in chunk_spans.limit_of_chunks(1, 245_760 * 64, 64)
    assert chunk_spans.limit_of_pieces(2**20, 64, 61_440 - 2**14) is None
    assert "room for 61440; got 61441: use fewer" in chunk_spans.limit_of_pieces(2**20, 64, 61_441 - 2**14)
    assert "got 81920" in chunk_spans.limit_of_pieces(2**20, 64, 0, block_size=16)
    assert tuning.smem_bytes(245_760) == tuning.smem_bytes(4, 61_440) == tuning.SMEM_LIMIT_BYTES
