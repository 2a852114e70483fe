"""Packed sequences of several chunks a grid step, interpreted, against the float64 recurrence."""

import pytest

from chunkwise.two_keys import Config
from tests import either_two_keys, several_chunks_suite

MORE = dict(fwd=1, summary=1, bwd=0)


@pytest.mark.parametrize("kind", either_two_keys.KINDS)
def test_packed_sequences(kind):
    of = either_two_keys.KINDS[kind]
    kernel = several_chunks_suite.Kernel(of.chunk, lambda chunks: Config(2, 2, chunks, chunks), MORE)
    kernel.assert_packed(of.inputs(1, 208, 1, 2, 24, 40, num_states=3))
