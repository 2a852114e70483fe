"""Under jit, vmap, remat, grad, eval_shape and export."""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, PartitionSpec

from chunkwise.kda import chunk_kda
from chunkwise.shared.testing.compare import STAGE_TOLERANCE, assert_close
from chunkwise.shared.testing.inputs import make_inputs
from chunkwise.shared.testing.tpu import text_for_tpu

both = pytest.mark.parametrize("implementation", ["xla", "fused"])

NAMES = ("q", "k", "v", "g", "beta")
HEADS = PartitionSpec(None, None, "data")

THOROUGH = dict(
    test_shard_map=lambda implementation: implementation == "fused",
    test_gradient_passes_the_check_of_shard_map=lambda replicated: replicated != NAMES,
)


def arguments(B=2):
    x = make_inputs(B, 20, 1, 1, 16, 8, per_channel=True)
    return tuple(x[name] for name in NAMES)


def run(implementation, *x):
    return chunk_kda(*x, chunk_size=16, implementation=implementation)[0]


@both
def test_shard_map(implementation):
    mesh = jax.make_mesh((1,), ("data",), axis_types=(AxisType.Auto,))
    rows = PartitionSpec("data")
    x = arguments()
    # The interpreter of Pallas kernels lacks the check of varying axes; compiled kernels pass it.
    options = dict(mesh=mesh, in_specs=(rows,) * 5, out_specs=rows, check_vma=implementation == "xla")
    sharded = jax.jit(jax.shard_map(functools.partial(run, implementation), **options))
    assert_close("o", sharded(*x), run(implementation, *x), STAGE_TOLERANCE)


@both
@pytest.mark.parametrize("replicated", [NAMES, ("q", "k"), ("initial_state",)])
def test_gradient_passes_the_check_of_shard_map(replicated, implementation):
    """Lowered for a TPU: the check of varying axes acts on compiled kernels; the others are cut by rows or by heads."""
    mesh = jax.make_mesh((1,), ("data",), axis_types=(AxisType.Auto,))
    x = make_inputs(2, 20, 1, 1, 16, 8, per_channel=True, num_states=2)
    cut = lambda name: PartitionSpec("data") if "q" not in replicated or name == "initial_state" else HEADS
    specs = {name: PartitionSpec() if name in replicated else cut(name) for name in x}
    operator = functools.partial(chunk_kda, output_final_state=True, implementation=implementation)
    loss = lambda x: sum(jnp.sum(y) for y in operator(**x))
    text = text_for_tpu(jax.shard_map(jax.grad(loss), mesh=mesh, in_specs=(specs,), out_specs=specs), x)
    assert text.count("stablehlo.all_reduce") >= len(replicated)
