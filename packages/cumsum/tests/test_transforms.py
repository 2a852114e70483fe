"""Under jit, vmap, remat, grad, eval_shape and export."""

import functools

import jax.numpy as jnp
import numpy as np
import pytest

from chunkwise.cumsum import chunk_local_cumsum
from chunkwise.shared import stage_reference
from chunkwise.shared.testing import (
    TRANSFORMS,
    assert_gradients,
    assert_traced_once,
    assert_transform,
    boundaries,
)

both = pytest.mark.parametrize("implementation", ["xla", "pallas"])


def gates(*shape):
    return jnp.asarray(-np.random.default_rng(0).random(shape), jnp.float32)


def run(implementation, **options):
    return functools.partial(chunk_local_cumsum, chunk_size=16, implementation=implementation, **options)


@both
@pytest.mark.parametrize("transform", TRANSFORMS)
def test_transform(transform, implementation):
    assert_transform(transform, run(implementation), (gates(2, 20, 3),))


@both
@pytest.mark.parametrize("reverse", [False, True], ids=["forward", "reverse"])
@pytest.mark.parametrize("lengths", [None, (1, 0, 17)], ids=["fixed", "packed"])
def test_gradients(lengths, reverse, implementation):
    cut = dict(cu_seqlens=None if lengths is None else boundaries(*lengths), reverse=reverse)
    definition = functools.partial(stage_reference.cumsum, chunk_size=16, **cut)
    assert_gradients(run(implementation, **cut), definition, dict(g=gates(1, 20, 2, 3)))


@both
def test_boundaries_are_traced(implementation):
    g = gates(1, 20, 3)
    batches = [(g, boundaries(*lengths)) for lengths in [(1, 0, 19), (16, 2, 2)]]
    assert_traced_once(lambda g, cu_seqlens: run(implementation, cu_seqlens=cu_seqlens)(g), *batches)
