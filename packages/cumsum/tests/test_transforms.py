"""Under jit, vmap, remat, grad, shard_map, eval_shape and export."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec

from chunkwise.cumsum import chunk_local_cumsum
from chunkwise.shared.testing import stage_oracle
from chunkwise.shared.testing.compare import assert_gradients
from chunkwise.shared.testing.inputs import boundaries
from chunkwise.shared.testing.transforms import TRANSFORMS, assert_traced_once, assert_transform, text_for_tpu

both = pytest.mark.parametrize("implementation", ["xla", "pallas"])


def gates(*shape):
    return jnp.asarray(-np.random.default_rng(0).random(shape), jnp.float32)


def run(implementation, **options):
    return functools.partial(chunk_local_cumsum, chunk_size=16, implementation=implementation, **options)


@pytest.mark.interpreted
@both
@pytest.mark.parametrize("transform", TRANSFORMS)
def test_transform(transform, implementation):
    assert_transform(transform, run(implementation), (gates(2, 20, 3),))


@both
@pytest.mark.parametrize("reverse", [False, True], ids=["forward", "reverse"])
@pytest.mark.parametrize("lengths", [None, (1, 0, 17)], ids=["fixed", "packed"])
def test_gradients(lengths, reverse, implementation):
    cut = dict(cu_seqlens=None if lengths is None else boundaries(*lengths), reverse=reverse)
    definition = functools.partial(stage_oracle.cumsum, chunk_size=16, **cut)
    assert_gradients(run(implementation, **cut), definition, dict(g=gates(1, 20, 2, 3)))


@pytest.mark.interpreted
@both
def test_boundaries_are_traced(implementation):
    g = gates(1, 20, 3)
    batches = [(g, boundaries(*lengths)) for lengths in [(1, 0, 19), (16, 2, 2)]]
    assert_traced_once(lambda g, cu_seqlens: run(implementation, cu_seqlens=cu_seqlens)(g), *batches)


def test_gradient_passes_the_check_of_shard_map():
    """Lowered for a TPU, whose kernels have the check of varying axes; every device cuts the same gates its own way."""
    mesh = jax.make_mesh((1,), ("data",), axis_types=(AxisType.Auto,))
    specs = PartitionSpec(), PartitionSpec("data")
    gradient = jax.grad(lambda g, cu_seqlens: jnp.sum(run("pallas", cu_seqlens=cu_seqlens)(g)))
    sharded = jax.shard_map(gradient, mesh=mesh, in_specs=specs, out_specs=specs[0])
    assert "stablehlo.all_reduce" in text_for_tpu(sharded, gates(1, 20, 3), boundaries(1, 0, 19))
