"""What a scheduler says as the tables that kernels get: all lie within the arrays, whatever it says."""

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from chunkwise.shared.call import arguments
from chunkwise.shared.kernels.spans import chunk_spans, pools
from chunkwise.shared.serving import run, state_pool, step_table
from chunkwise.shared.serving.state_pool import StatePool
from tests.engine import make_rubbish

N, W, M, SLOTS, T, C, BLOCK = 5, 3, 2, 9, 150, 16, 32
NT = -(-T // C)
LEAST, MOST = np.iinfo(np.int32).min, np.iinfo(np.int32).max
any_number = st.one_of(st.integers(-3, T + 3), st.sampled_from([LEAST, LEAST + 1, -(2**30), 2**30, MOST]))


pieces = jax.jit(lambda cu_seqlens: chunk_spans.make_spans(T, C, cu_seqlens, True)[0])


def within(x, low: int, high) -> None:
    """Fail unless all of x are at least `low` and below `high`."""
    x = np.asarray(x)
    assert np.all((x >= low) & (x < high)), x


@jax.jit
def tables(schedule):
    """Return a step and all that its kernels read of it."""
    schedule = dict(schedule)
    step = step_table.find_step(schedule.pop("cu_seqlens"), arguments.Slots(**schedule), SLOTS, T)
    held = pools.resident_slots(step.decodes.source, step.decodes.target.reshape(-1))
    return step, held, chunk_spans.pool_spans(T, C, step.prefills, BLOCK)


@hypothesis.settings(max_examples=200, deadline=None, derandomize=True)
@hypothesis.given(st.randoms(use_true_random=False), st.booleans())
def test_steps_lie_within_arrays(random, with_reads):
    schedule = make_rubbish(random, N, W, M, SLOTS, T, with_reads)
    hypothesis.note(str(schedule))
    step, held, (table, count) = jax.device_get(tables(schedule))
    within(np.diff(step.boundaries), 0, T + 1)
    within(step.boundaries, 0, T + 1)
    within(step.tokens, 0, T + 1)
    # The kernel for decodes gets the first N W tokens at most.
    within(step.decodes.start, 0, N * W + 1)
    within(step.decodes.end, 0, min(T, N * W) + 1)
    within(step.decodes.end - step.decodes.start, 0, W + 1)
    within(np.concatenate(held), 0, SLOTS)
    for routes in (step.decodes, step.prefills):
        for named in (routes.source, routes.target, *([] if routes.blocks is None else [routes.blocks])):
            within(named, -1, SLOTS)
    assert_steps(table[:, :count], SLOTS)
    piece = chunk_spans.Piece(table, np.s_[:], C)
    within(piece.target, 0, SLOTS)
    # Nothing is left for steps behind those that run, and a sequence without tokens has none.
    assert not np.any(
        (piece.end > piece.begin) | piece.first | piece.last | piece.opens,
        where=np.arange(len(piece.begin)) >= count,
    )
    ends = np.diff(step.boundaries) > 0
    assert count <= NT + np.sum(ends) + T // BLOCK


def assert_steps(table, sequences: int) -> None:
    """Fail unless the pieces of a table lie in the chunks of the stream, which have one at least, in order."""
    piece = chunk_spans.Piece(table, np.s_[:], C)
    chunk, begin, end = (np.asarray(x, int) for x in (piece.chunk, piece.begin, piece.end))
    within(piece.sequence, 0, sequences)
    within(np.diff(chunk), 0, 2)
    assert (chunk[0], chunk[-1]) == (0, NT - 1)
    within(begin, 0, C + 1)
    within(end - begin, 0, C + 1)
    assert np.all(chunk * C + end <= np.maximum(T, chunk * C + begin))
    assert np.sum(piece.opens) == NT


@hypothesis.settings(max_examples=100, deadline=None, derandomize=True)
@hypothesis.given(st.lists(any_number, min_size=N + 1, max_size=N + 1))
def test_pieces_lie_within_the_stream(cu_seqlens):
    """Those of operators over whole sequences with states."""
    table = jax.device_get(pieces(np.array(cu_seqlens, np.int32)))
    assert_steps(table, N)
    assert np.sum(chunk_spans.Piece(table, np.s_[:], C).closes) == NT


@pytest.mark.parametrize(("begin", "end", "blocks"), [(0, 128, 4), (0, 128, 1), (22, T, 2), (0, 96, 3), (0, 100, 3)])
def test_a_sequence_that_ends_with_the_stream_writes_its_slot(begin, end, blocks):
    """The state after its last block goes to a slot of its own, from the same tokens."""
    starts, ends, slot = (jnp.array([n], jnp.int32) for n in (begin, end, 8))
    routes = pools.Routes(starts, ends, slot, slot[:, None], jnp.arange(blocks, dtype=jnp.int32)[None])
    table, count = chunk_spans.pool_spans(end, C, routes, BLOCK)
    piece = chunk_spans.Piece(table[:, : int(count)], np.s_[:], C)
    written = np.asarray(piece.target)[np.asarray(piece.last) == 1]
    np.testing.assert_array_equal(written, [*range(min(blocks, (end - begin) // BLOCK)), 8])


def test_blocks_that_no_sequence_can_fill():
    """The end of the second one would not be an int32."""
    routes = pools.Routes(*(jnp.array([x]) for x in (0, T, -1, [-1])), jnp.array([[3, 4]]))
    assert step_table.full_blocks(routes, 2**30)[1].tolist() == [[-1, -1]]
    assert step_table.full_blocks(routes, BLOCK)[1].tolist() == [[3, 4]]


def test_states_after_blocks_beside_decodes():
    """They are those before the next chunk, or after the sequence, where the tokens of decodes have chunks, too."""
    int32 = lambda *x: jnp.array(x, jnp.int32)
    routes = pools.Routes(int32(3, 19), int32(19, 25), int32(0, 0), int32([4], [5]), int32([0, 1], [2, 3]))
    numbers = lambda first, n: jnp.arange(first, first + n, dtype=jnp.float32).reshape(n, 1, 1, 1)
    options = arguments.Options(chunk_size=4, block_size=8)
    pool = run._write_blocks(StatePool(jnp.zeros((6, 1, 1, 1))), numbers(1, 7), numbers(100, 2), routes, options)
    assert pool.states.ravel().tolist() == [4, 100, 0, 0, 0, 0]


def test_slots_that_a_step_does_not_write_keep_their_drafts():
    before, after = (state_pool.make_pool(2, 1, 1, 1, replay=4)._replace(drafts=jnp.array(x)) for x in ([1, 3], [2, 3]))
    assert state_pool.with_tokens_of(after, before, jnp.array([0], jnp.int32), 2).drafts.tolist() == [2 + 2**16, 3]
