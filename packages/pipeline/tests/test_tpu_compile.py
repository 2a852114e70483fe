"""The staged chain compiles for real TPUs, and across several of them."""

import functools
import math
import re

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from chunkwise import pipeline
from chunkwise.delta_product import chunk_gated_delta_product
from chunkwise.dplr import chunk_dplr_delta_rule
from chunkwise.pipeline import chunk_gated_delta_rule
from chunkwise.shared.chips import CHIPS
from chunkwise.shared.testing import inputs, tpu
from tests import compilation

pytestmark = pytest.mark.tpu

RAGGED = "gated_delta_rule", "kda", "simple_gla"
QUICK_STEPS = ("kda", 3, jnp.float32), ("simple_gla", None, jnp.bfloat16)
QUICK_POOL = ("gated_delta_rule", 64, 96, jnp.float32)
THOROUGH = dict(
    test_serving_step_moves_no_states=lambda name, W, dtype: (name, W, dtype) not in QUICK_STEPS,
    test_large_pools_of_any_size_are_not_copied=lambda name, K, V, dtype: (name, K, V, dtype) != QUICK_POOL,
    test_serving_steps_compile=lambda name: name != "gated_delta_rule",
)


def specs(B, T):
    def struct(*shape, dtype=jnp.bfloat16):
        return jax.ShapeDtypeStruct((B, T, *shape), dtype)

    return struct(2, 128), struct(2, 128), struct(4, 128), struct(4, dtype=jnp.float32), struct(4)


@pytest.mark.parametrize("chip", CHIPS)
@pytest.mark.parametrize(("name", "n"), [*(("gated_delta_product", n) for n in (2, 3, 4)), ("dplr_delta_rule", 2)])
def test_operators_of_several_tokens_compile(name, n, chip):
    """Forward and backward, at the shapes of the operators that run another one over several tokens for each."""
    spec = functools.partial(inputs.spec, dtype=jnp.bfloat16)
    if name == "dplr_delta_rule":
        operator = functools.partial(chunk_dplr_delta_rule, min_gate=-0.61)
        x = dict.fromkeys(("q", "k", "v", "a", "b"), spec(1, 96, 2, 64)) | dict(gk=inputs.spec(1, 96, 2, 64))
    else:
        operator = functools.partial(chunk_gated_delta_product, num_householder=n)
        k, v, beta = spec(1, 96 * n, 1, 128), spec(1, 96 * n, 2, 128), inputs.spec(1, 96 * n, 2)
        x = dict(q=spec(1, 96, 1, 128), k=k, v=v, beta=beta, g=inputs.spec(1, 96, 2))
    text = compilation.compile_gradient(operator, x, inputs.spec(4, dtype=jnp.int32), chip, output_final_state=True)
    kernel = "gated_delta_rule" if name == "gated_delta_product" else name
    assert all(f"chunk_{kernel}_{part}_c64" in text for part in ("fwd", "bwd"))


@pytest.mark.parametrize("name", ["chunk_kda", "recurrent_kda"])
def test_float16_compiles(name):
    """TPU kernels cannot read it: they get float32."""
    q, k, v, _, beta = specs(1, 2)
    x = [jax.ShapeDtypeStruct(y.shape, jnp.float16) for y in (q, k, v, v, beta)]
    options = {"implementation": "staged" if name == "chunk_kda" else "fused"}
    compiled = tpu.compile_for(lambda *x: getattr(pipeline, name)(*x, **options)[0], *x)
    assert "tpu_custom_call" in compiled.as_text()
    assert compiled.out_info.dtype == jnp.float16


def compile_step(name, pool, N, W=None, *, T=40, chip="v6e", auto_layout=False):
    """Return a serving step of an operator, whose pool is donated, as compiled for a TPU."""
    _, HV, K, V = pool.shape
    H, spec, index = HV // 2, jax.ShapeDtypeStruct, lambda *shape: jax.ShapeDtypeStruct(shape, jnp.int32)
    tensors = [spec((1, T, *tail), jnp.bfloat16) for tail in ((H, K), (H, K), (HV, V))]
    tensors += [spec((1, T, HV, K) if name == "kda" else (1, T, HV), jnp.float32)]
    tensors += [spec((1, T, HV), jnp.float32)] * (name != "simple_gla")
    which = dict(
        cu_seqlens=index(N + 1), state_indices=index(N) if W is None else index(N, W), num_decodes=index(),
        num_sequences=index(), has_initial_state=spec((N,), bool),
    ) | ({} if W is None else dict(num_accepted_tokens=index(N)))  # fmt: skip

    def step(pool, tensors, which):
        which = dict(which)
        positional = which.pop("cu_seqlens"), which.pop("state_indices")
        return getattr(pipeline, f"ragged_{name}")(*tensors, pool, *positional, **which, implementation="fused")

    return tpu.compile_for(step, pool, tensors, which, chip=chip, auto_layout=auto_layout, donate_argnums=(0,))


def assert_moves_no_states(text, pool, states=1):
    """Fail unless only the two kernels touch the donated pool, and no other array is as large as so many states."""
    # The type and the operation of every result.
    made = re.findall(r"^\s*(?:ROOT )?%?\S+ = (.+?) ([a-z][a-z0-9-]*)\(", text, re.MULTILINE)
    sizes = [
        (operation, size)
        for result, operation in made
        for dims in re.findall(r"\b[a-z]+\d+\[([\d,]+)\]", result)
        if (size := math.prod(map(int, dims.split(",")))) >= states * math.prod(pool.shape[1:])
    ]
    assert {size for _, size in sizes} == {math.prod(pool.shape)}
    touching = [operation for operation, _ in sizes]
    assert set(touching) <= {"parameter", "tuple", "get-tuple-element", "bitcast", "conditional", "custom-call"}
    assert touching.count("custom-call") == 2
    assert re.search(r"input_output_alias=\{[^\n]*\(0, \{\}, ", text)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("W", [None, 3])
@pytest.mark.parametrize("name", RAGGED)
def test_serving_step_moves_no_states(name, W, dtype):
    """Decodes and prefills beside each other: only the two kernels touch the pool, and no other array holds a state."""
    pool = jax.ShapeDtypeStruct((37, 4, 128, 128), dtype)
    assert_moves_no_states(compile_step(name, pool, 8, W).as_text(), pool)


@pytest.mark.parametrize("name", RAGGED)
@pytest.mark.parametrize(("K", "V"), [(64, 96), (128, 64), (96, 128), (64, 64)])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_large_pools_of_any_size_are_not_copied(name, K, V, dtype):
    """In the layout of the kernels, K and V may be anything. Small pools have it anyway; large ones must ask for it."""
    pool = jax.ShapeDtypeStruct((512, 4, K, V), dtype)
    compiled = compile_step(name, pool, 8, 2, auto_layout=True)
    # A tile of tokens is larger than such a state.
    assert_moves_no_states(compiled.as_text(), pool, states=8)
    memory, size = compiled.memory_analysis(), pool.dtype.itemsize * math.prod(pool.shape)
    assert memory.alias_size_in_bytes >= size
    assert memory.temp_size_in_bytes < size / 8


def test_chain_compiles_under_shard_map():
    """Batch rows over the chips of a topology, with the default check of varying axes."""
    mesh = tpu.topology_mesh(CHIPS["v6e"].topology, "data")
    rows = PartitionSpec("data")
    run = functools.partial(chunk_gated_delta_rule, output_final_state=True, implementation="staged")
    tensors = [jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, rows)) for x in specs(4, 64)]
    sharded = jax.shard_map(run, mesh=mesh, in_specs=(rows,) * 5, out_specs=(rows, rows))
    text = jax.jit(sharded).trace(*tensors).lower().compile().as_text()
    assert "chunk_gated_delta_rule_fwd_h_fwd_c64" in text


@pytest.mark.parametrize("name", RAGGED)
@pytest.mark.parametrize("chip", CHIPS)
def test_serving_steps_compile(chip, name):
    """Every operator and type of pool that kernels take, of sizes that fill no register: the pool is taken as it is."""
    K, V = 64, 96
    pool = jax.ShapeDtypeStruct((50, 4, K, V), jnp.float32 if name == "simple_gla" else jnp.bfloat16)
    text = compile_step(name, pool, 3, 2, T=200, chip=chip).as_text()
    assert text.count('custom_call_target="tpu_custom_call"') == 2
    found = re.findall(rf"= (\w+)\[50,4,{K},{V}\]\S* (copy|fusion|gather|scatter)\(", text)
    assert found == []
