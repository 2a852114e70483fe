"""Under jit, vmap, remat, grad, eval_shape and export."""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, PartitionSpec

from chunkwise.kda import chunk_kda
from chunkwise.shared.testing.inputs import make_inputs
from chunkwise.shared.testing.tpu import text_for_tpu

both = pytest.mark.parametrize("implementation", ["xla", "fused"])

NAMES = ("q", "k", "v", "g", "beta")
HEADS = PartitionSpec(None, None, "data")

THOROUGH = dict(
    test_gradient_passes_the_check_of_shard_map=lambda replicated: replicated != NAMES,
)


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
