"""Under jit, vmap, remat, grad, shard_map, eval_shape and export."""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, PartitionSpec

from chunkwise.kkt import chunk_scaled_dot_kkt
from chunkwise.shared.testing import stage_oracle
from chunkwise.shared.testing.cases import Case
from chunkwise.shared.testing.compare import assert_gradients
from chunkwise.shared.testing.inputs import boundaries
from chunkwise.shared.testing.transforms import TRANSFORMS, assert_traced_once, assert_transform, text_for_tpu

NAMES = ("k", "beta", "g_cum")


def arguments(**sizes):
    x = Case(**dict(T=20, HV=2, K=3, chunk_size=16) | sizes).arguments()
    return {name: x[name] for name in NAMES}


def run(implementation, cu_seqlens=None):
    return functools.partial(chunk_scaled_dot_kkt, cu_seqlens=cu_seqlens, chunk_size=16, implementation=implementation)


@pytest.mark.interpreted
@pytest.mark.parametrize("implementation", ["xla", "pallas"])
@pytest.mark.parametrize("transform", TRANSFORMS)
def test_transform(transform, implementation):
    assert_transform(transform, run(implementation), tuple(arguments(B=2).values()))


@pytest.mark.parametrize(
    ("implementation", "lengths"),
    [
        pytest.param("xla", None, id="xla-fixed", marks=pytest.mark.thorough),
        pytest.param("xla", (1, 0, 17), id="xla-packed"),
        pytest.param("pallas", None, id="pallas-fixed"),
        pytest.param("pallas", (1, 0, 17), id="pallas-packed"),
    ],
)
def test_gradients(implementation, lengths):
    cu_seqlens = None if lengths is None else boundaries(*lengths)
    definition = functools.partial(stage_oracle.kkt, chunk_size=16, cu_seqlens=cu_seqlens)
    assert_gradients(run(implementation, cu_seqlens), definition, arguments())


@pytest.mark.interpreted
@pytest.mark.parametrize("implementation", ["xla", "pallas"])
def test_boundaries_are_traced(implementation):
    x = tuple(arguments().values())
    batches = [(*x, boundaries(*lengths)) for lengths in [(1, 0, 19), (16, 2, 2)]]
    assert_traced_once(functools.partial(chunk_scaled_dot_kkt, chunk_size=16, implementation=implementation), *batches)


def test_gradient_passes_the_check_of_shard_map():
    """Lowered for a TPU, whose kernels have the check of varying axes; a replicated operand's gradient is a sum."""
    mesh = jax.make_mesh((1,), ("data",), axis_types=(AxisType.Auto,))
    x = arguments(B=2)
    specs = {name: PartitionSpec(*("data",) * (name == "k")) for name in x}
    gradient = jax.grad(lambda x: sum(jnp.sum(y) for y in jax.tree.leaves(run("pallas")(**x))))
    text = text_for_tpu(jax.shard_map(gradient, mesh=mesh, in_specs=(specs,), out_specs=specs), x)
    assert "stablehlo.all_reduce" in text
