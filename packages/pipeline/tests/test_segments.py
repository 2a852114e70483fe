"""Segments of rows under every operator: the staged chains here, the other implementations in their packages."""

import functools

import jax.numpy as jnp
import pytest

from chunkwise.pipeline.operators import CHUNKED, OPERATORS
from tests.segment_suite import SEGMENT_IDS, assert_segments, over_segments
from tests.transforms import assert_traced_once

B, T = SEGMENT_IDS.shape
named = functools.partial(pytest.mark.parametrize, "operator", ids=lambda operator: operator.name)
# What tells segments apart stands before the stages, and is the same for all.
# The packages have segments in their kernels, and new ids as the same program are of a chain of stages.
THOROUGH = dict(test_staged=True)


def inputs_of(operator):
    return operator.source.inputs(B, T, 1, 2, 8, 8, num_states=B)


@named(CHUNKED)
def test_staged(operator):
    assert_segments(over_segments(operator.function, "staged"), inputs_of(operator))


def test_new_ids_are_the_same_program():
    """All implementations that know no segments share what is around them."""
    operator = OPERATORS["chunk_simple_gla"]
    x = inputs_of(operator)
    run = lambda ids: operator.function(**x, segment_ids=ids, implementation="xla")[0]
    assert_traced_once(run, (jnp.asarray(SEGMENT_IDS),), (jnp.zeros((B, T), jnp.int32),))


@named(CHUNKED)
def test_errors(operator):
    x = inputs_of(operator)
    ids = jnp.zeros((B, T), jnp.int32)
    bad = {
        r"`segment_ids` must be int32 of shape \(3, 40\); got int32 \(40,\)": ids[0],
        r"`segment_ids` must be int32 of shape \(3, 40\); got float32 \(3, 40\)": ids.astype(jnp.float32),
        r"`segment_ids` must be int32 of shape \(3, 40\); got list": ids.tolist(),
    }
    for message, segment_ids in bad.items():
        with pytest.raises(ValueError, match=message):
            operator.function(**x, segment_ids=segment_ids)
    row = {name: y if name == "g_gamma" else y[:1] for name, y in x.items()}
    with pytest.raises(ValueError, match="`segment_ids` must be None if `cu_seqlens` is given; got both"):
        operator.function(**row, segment_ids=ids[:1], cu_seqlens=jnp.array([0, T], jnp.int32))
