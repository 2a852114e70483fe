"""Under jit, vmap, remat, export, shard_map, 64 bits and strict promotion; one compilation for all boundaries."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec

from chunkwise.causal_conv1d import causal_conv1d
from chunkwise.shared.testing.compare import assert_close
from chunkwise.shared.testing.inputs import boundaries
from chunkwise.shared.testing.transforms import TRANSFORMS, assert_traced_once, assert_transform, text_for_tpu

RNG = np.random.default_rng(0)
WEIGHT = jnp.asarray(RNG.standard_normal((5, 4)), jnp.float32)
X = jnp.asarray(RNG.standard_normal((2, 20, 5)), jnp.float32)
STATE = jnp.asarray(RNG.standard_normal((2, 3, 5)), jnp.float32)


@pytest.mark.interpreted
@pytest.mark.parametrize("implementation", ["xla", "pallas"])
@pytest.mark.parametrize("transform", TRANSFORMS)
def test_transform(transform, implementation):
    run = lambda x, h: causal_conv1d(x, WEIGHT, None, h, True, implementation=implementation)
    assert_transform(transform, run, (X, STATE))


@pytest.mark.interpreted
@pytest.mark.parametrize("implementation", ["xla", "pallas"])
def test_boundaries_are_traced(implementation):
    run = lambda x, cu: causal_conv1d(x, WEIGHT, cu_seqlens=cu, implementation=implementation)[0]
    assert_traced_once(run, *((X[:1], boundaries(*lengths)) for lengths in [(1, 0, 19), (16, 2, 2)]))


@pytest.mark.parametrize("implementation", ["xla", "pallas"])
def test_ids_are_traced(implementation):
    run = lambda x, ids: causal_conv1d(x, WEIGHT, segment_ids=ids, implementation=implementation)[0]
    ids = [jnp.asarray(RNG.integers(-1, 3, (2, 20)), jnp.int32) for _ in range(2)]
    assert_traced_once(run, *((X, y) for y in ids))


@pytest.mark.parametrize("implementation", ["xla", "pallas"])
def test_64_bits_and_strict_promotion(implementation):
    run = functools.partial(causal_conv1d, cu_seqlens=boundaries(7, 11), implementation=implementation)
    loss = lambda x, weight, h: jnp.sum(run(x, weight, None, h)[0])
    gradient = jax.grad(loss, argnums=(0, 1, 2))
    want = gradient(X[:1], WEIGHT, STATE)
    with jax.enable_x64(True), jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        got = gradient(X[:1], WEIGHT, STATE)
    for name, a, b in zip(("dx", "dweight", "dh0"), got, want, strict=True):
        assert a.dtype == jnp.float32
        assert_close(name, a, b, 1e-6)


def test_gradient_passes_the_check_of_shard_map():
    mesh = jax.make_mesh((1,), ("data",), axis_types=(AxisType.Auto,))
    specs = (PartitionSpec("data"), PartitionSpec())
    loss = lambda x, weight: jnp.sum(causal_conv1d(x, weight, implementation="pallas")[0])
    gradient = jax.shard_map(jax.grad(loss, argnums=(0, 1)), mesh=mesh, in_specs=specs, out_specs=specs)
    assert "stablehlo.all_reduce" in text_for_tpu(gradient, X, WEIGHT)
