"""Under jit, vmap, remat, grad, eval_shape and export."""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, PartitionSpec

from chunkwise.kda import chunk_kda
from chunkwise.shared.testing.compare import GRADIENT_TOLERANCE, STAGE_TOLERANCE, TOLERANCE, assert_close
from chunkwise.shared.testing.inputs import boundaries, make_inputs
from chunkwise.shared.testing.oracle import reference
from chunkwise.shared.testing.tpu import text_for_tpu
from tests.transforms import assert_traced_once, assert_transform

both = pytest.mark.parametrize("implementation", ["xla", "fused"])

NAMES = ("q", "k", "v", "g", "beta")
HEADS = PartitionSpec(None, None, "data")

THOROUGH = dict(
    test_gradient_under_vmap_and_remat=True,
    # The pipeline has exports and traced boundaries of all operators.
    test_transform=True,
    test_boundaries_are_traced=True,
    test_shard_map=lambda implementation: implementation == "fused",
    test_gradient_passes_the_check_of_shard_map=lambda replicated: replicated != NAMES,
    test_cost_of_a_pack_follows_its_tokens=True,
)


def arguments(B=2):
    x = make_inputs(B, 20, 1, 1, 16, 8, per_channel=True)
    return tuple(x[name] for name in NAMES)


def run(implementation, *x):
    return chunk_kda(*x, chunk_size=16, implementation=implementation)[0]


# Under jit is `test_boundaries_are_traced`, under remat and vmap `test_gradient_under_vmap_and_remat`.
@both
@pytest.mark.parametrize("transform", ["vmap", "export"])
def test_transform(transform, implementation):
    assert_transform(transform, functools.partial(run, implementation), arguments())


@both
def test_shard_map(implementation):
    mesh = jax.make_mesh((1,), ("data",), axis_types=(AxisType.Auto,))
    rows = PartitionSpec("data")
    x = arguments()
    # The interpreter of Pallas kernels lacks the check of varying axes; compiled kernels pass it.
    options = dict(mesh=mesh, in_specs=(rows,) * 5, out_specs=rows, check_vma=implementation == "xla")
    sharded = jax.jit(jax.shard_map(functools.partial(run, implementation), **options))
    assert_close("o", sharded(*x), run(implementation, *x), STAGE_TOLERANCE)


def test_gradient_under_vmap_and_remat():
    x = make_inputs(2, 20, 1, 1, 16, 8, per_channel=True)
    loss = lambda x: jnp.sum(run("fused", *(x[name][None] for name in NAMES)) ** 2)
    gradients = jax.jit(jax.vmap(jax.grad(jax.checkpoint(loss))))(x)
    expected = reference(**x, do=2.0 * reference(**x)[0])[2]
    for name, gradient in gradients.items():
        assert_close(f"d{name}", gradient, expected[name], GRADIENT_TOLERANCE["float32"])


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


@both
def test_boundaries_are_traced(implementation):
    x = arguments(B=1)
    batches = [(*x, boundaries(*lengths)) for lengths in [(1, 0, 19), (16, 2, 2)]]
    packed = lambda *x: chunk_kda(*x[:5], cu_seqlens=x[5], chunk_size=16, implementation=implementation)[0]
    expected = lambda *x: reference(*x[:5], cu_seqlens=x[5])[0]
    assert_traced_once(packed, *batches, expected=expected, tolerance=TOLERANCE["float32"])


def test_cost_of_a_pack_follows_its_tokens():
    """512 documents of 16 tokens cost at most twice one document of 8,192, in what XLA counts."""
    x = [jax.ShapeDtypeStruct(s, jnp.float32) for s in [(1, 8192, 1, 64)] * 4 + [(1, 8192, 1)]]

    def cost(**options):
        compiled = jax.jit(lambda *x: chunk_kda(*x, implementation="xla", **options)[0]).lower(*x).compile()
        analysis = compiled.cost_analysis()
        return analysis["flops"], analysis["bytes accessed"]

    alone = cost()
    packed = cost(cu_seqlens=jnp.arange(0, 8193, 16, dtype=jnp.int32))
    assert packed[0] <= 2 * alone[0]
    assert packed[1] <= 2 * alone[1]
