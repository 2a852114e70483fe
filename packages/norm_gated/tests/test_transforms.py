"""Under jit, vmap, remat, export, shard_map, 64 bits and strict promotion."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec

from chunkwise.norm_gated import rms_norm_gated
from chunkwise.shared.testing.compare import assert_close
from chunkwise.shared.testing.transforms import TRANSFORMS, assert_transform, text_for_tpu


def arguments():
    rng = np.random.default_rng(0)
    return tuple(jnp.asarray(rng.standard_normal((2, 7, 3, 20)), jnp.float32) for _ in range(2))


WEIGHT = jnp.linspace(0.5, 1.5, 20)


def run(implementation):
    return functools.partial(rms_norm_gated, weight=WEIGHT, implementation=implementation)


@pytest.mark.interpreted
@pytest.mark.parametrize("implementation", ["xla", "pallas"])
@pytest.mark.parametrize("transform", TRANSFORMS)
def test_transform(transform, implementation):
    assert_transform(transform, run(implementation), arguments())


@pytest.mark.parametrize("implementation", [pytest.param("xla", marks=pytest.mark.thorough), "pallas"])
def test_64_bits_and_strict_promotion(implementation):
    loss = lambda x, z, weight: jnp.sum(rms_norm_gated(x, z, weight, implementation=implementation))
    gradient = jax.grad(loss, argnums=(0, 1, 2))
    want = gradient(*arguments(), WEIGHT)
    with (
        jax.enable_x64(True),
        jax.numpy_dtype_promotion("strict"),
        jax.numpy_rank_promotion("raise"),
    ):
        got = gradient(*arguments(), WEIGHT)
    for name, a, b in zip(("dx", "dz", "dweight"), got, want, strict=True):
        assert a.dtype == jnp.float32
        assert_close(name, a, b, 1e-6)


def test_gradient_passes_the_check_of_shard_map():
    mesh = jax.make_mesh((1,), ("data",), axis_types=(AxisType.Auto,))
    specs = (PartitionSpec("data"), PartitionSpec("data"), PartitionSpec())
    loss = lambda *a: jnp.sum(rms_norm_gated(*a, implementation="pallas"))
    gradient = jax.shard_map(jax.grad(loss, argnums=(0, 1, 2)), mesh=mesh, in_specs=specs, out_specs=specs)
    assert "stablehlo.all_reduce" in text_for_tpu(gradient, *arguments(), WEIGHT)
