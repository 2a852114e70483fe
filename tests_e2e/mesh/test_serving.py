"""A serving step divides itself over value heads and channels, and so do its pools: of the operator, of the layer."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding

from chunkwise import layers, pipeline
from chunkwise.causal_conv1d import causal_conv1d_update
from chunkwise.shared.testing.inputs import spec
from chunkwise.shared.testing.tpu import has_libtpu, launches, topology_mesh
from tests_e2e.mesh.meshes import P, collectives, inputs_of, make_mesh

SLOTS = 7


# Kinds of axes, with a kernel or in plain JAX.
THOROUGH = dict(
    test_step_over_heads_and_channels=lambda mode, implementation, name: (
        (mode, implementation, name) != ("explicit", "fused", "gated_delta_rule")
    ),
    test_convolution_of_a_step=lambda mode, implementation: (mode == "explicit") != (implementation == "pallas"),
    test_decode_of_the_convolution=lambda implementation: implementation == "pallas",
    test_a_layer_compiles_for_tpus=True,
)
both_modes = pytest.mark.parametrize("mode", ["explicit", "automatic"])


@pytest.mark.parametrize("name", ["gated_delta_rule", "kda", "gdn2", "comba", "simple_gla"])
@pytest.mark.parametrize("implementation", ["fused", "xla"])
@both_modes
def test_step_over_heads_and_channels(mode, implementation, name):
    """Every device has its heads of the pool, and no device asks another for anything."""
    x = inputs_of(f"chunk_{name}", B=1, T=40, states=SLOTS)
    pool = x.pop("initial_state")
    boundaries, slots = jnp.array([0, 1, 3, 3, 30], jnp.int32), jnp.array([[2, 5], [0, 1], [4, -1], [6, -1]], jnp.int32)
    mesh, spec = make_mesh((2, 2), mode), P(None, None, "a", "b")
    heads = P(None, None, "a")
    split = dict(q=P(), k=P(), v=spec, g=heads, beta=heads, g_gamma=P("a"), p=P(), b=heads, w=spec)
    sharding = NamedSharding(mesh, spec) if mode == "automatic" else None

    def step(x, pool, boundaries, slots, decodes, sharding=None):
        return getattr(pipeline, f"ragged_{name}")(
            **x, states=pool, cu_seqlens=boundaries, state_indices=slots, num_decodes=decodes,
            implementation=implementation, sharding=sharding,
        )  # fmt: skip

    wanted = jax.jit(step)(x, pool, boundaries, slots, jnp.int32(2))
    put = lambda y, spec: jax.device_put(y, NamedSharding(mesh, spec))
    placed = {name: put(y, split[name]) for name, y in x.items()}
    arguments = placed, put(pool, P(None, "a", None, "b")), *(put(y, P()) for y in (boundaries, slots, jnp.int32(2)))
    program = jax.jit(step, static_argnames="sharding").lower(*arguments, sharding=sharding).compile()
    assert collectives(program.as_text()) == []
    for got, want in zip(program(*arguments), wanted, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


W, D = 4, 16
CONVOLUTION = dict(x=P(None, None, ("a", "b")), states=P(None, None, ("a", "b")), weight=P(("a", "b")), bias=P())


def convolution(B: int, T: int, slots: int) -> dict:
    """Return tokens, a pool, weight and bias of a convolution."""
    rng, shapes = np.random.default_rng(0), dict(x=(B, T, D), states=(slots, W - 1, D), weight=(D, W), bias=(D,))
    return {name: jnp.asarray(rng.standard_normal(shape), jnp.float32) for name, shape in shapes.items()}


def put(mesh, arrays: dict, specs: dict) -> dict:
    return {name: jax.device_put(y, NamedSharding(mesh, specs.get(name, P()))) for name, y in arrays.items()}


def assert_equal_on_mesh(run, mesh, arrays: dict, specs: dict, sharding) -> list:
    """Fail unless results over the mesh are those of one device, made without a collective; return them."""
    wanted = jax.jit(run)(arrays)
    placed = put(mesh, arrays, specs)
    program = jax.jit(run, static_argnames="sharding").lower(placed, sharding=sharding).compile()
    assert collectives(program.as_text()) == []
    results = program(placed)
    for got, want in zip(results, wanted, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-6)
    return results


@pytest.mark.parametrize("implementation", ["pallas", "xla"])
@both_modes
def test_convolution_of_a_step(mode, implementation):
    """Every device has its channels of the pool: decodes, speculation, blocks, and a prefix that is read."""
    mesh, split = make_mesh((2, 4), mode), CONVOLUTION["x"]
    step = dict(
        cu_seqlens=jnp.array([0, 1, 3, 3, 30], jnp.int32), num_decodes=jnp.int32(2), num_sequences=jnp.int32(4),
        state_indices=jnp.array([[2, 5], [0, 1], [4, -1], [6, -1]], jnp.int32),
        has_initial_state=jnp.array([True, True, False, True]), read_indices=jnp.array([2, 3, -1, 3], jnp.int32),
        block_state_indices=jnp.array([[-1], [-1], [-1], [7]], jnp.int32),
    )  # fmt: skip

    options = dict(activation="silu", block_size=16, implementation=implementation)
    run = lambda given, sharding=None: causal_conv1d_update(**given, **options, sharding=sharding)
    sharding = NamedSharding(mesh, split) if mode == "automatic" else None
    _, pool = assert_equal_on_mesh(run, mesh, convolution(1, 40, 9) | step, CONVOLUTION, sharding)
    assert pool.sharding.spec[2] == ("a", "b")


@pytest.mark.parametrize("implementation", ["pallas", "xla"])
@both_modes
def test_decode_of_the_convolution(mode, implementation):
    """Rows and channels: a device has its sequences and its part of the slots, and gradients are sums over rows."""
    mesh, rows = make_mesh((2, 4), mode), P("a", None, "b")
    specs = dict(x=rows, states=rows, weight=P("b"), bias=P(), state_indices=P("a"), has_initial_state=P("a"))
    step = dict(
        state_indices=jnp.array([3, -1, 0, 5, 7, 4], jnp.int32),
        has_initial_state=jnp.array([True, True, False, True, True, False]),
    )
    arrays, sharding = convolution(6, 1, 8), NamedSharding(mesh, rows) if mode == "automatic" else None

    def run(given, sharding=None):
        return causal_conv1d_update(**given, activation="silu", implementation=implementation, sharding=sharding)

    def gradient(arrays, step, sharding=None):
        loss = lambda arrays: sum(jnp.sum(jnp.sin(y)) for y in run(arrays | step, sharding))
        return jax.grad(loss)(arrays)

    y, _ = assert_equal_on_mesh(run, mesh, arrays | step, specs, sharding)
    assert not np.isnan(y).any()
    wanted = jax.jit(gradient)(arrays, step)
    placed = put(mesh, arrays, specs), put(mesh, step, specs)
    got = jax.jit(gradient, static_argnames="sharding")(*placed, sharding=sharding)
    for name, want in wanted.items():
        np.testing.assert_allclose(got[name], want, rtol=1e-5, atol=1e-5, err_msg=name)


def test_a_slot_on_another_device():
    """The output of its sequence is NaN, because a state does not travel, and nothing is written."""
    mesh, rows = make_mesh((2,), "automatic"), P("a")
    given = convolution(2, 1, 4)
    slots = jnp.array([3, 2], jnp.int32)  # the first row lies with slots 0 and 1
    sharding = NamedSharding(mesh, rows)
    y, pool = jax.jit(lambda given: causal_conv1d_update(**given, state_indices=slots, sharding=sharding))(given)
    want, states = causal_conv1d_update(**given, state_indices=jnp.array([-1, 2], jnp.int32))
    assert np.isnan(y[0]).all()
    np.testing.assert_allclose(y[1], want[1], rtol=1e-6)
    np.testing.assert_array_equal(pool, states)


@pytest.mark.parametrize(
    ("split", "B", "T", "message"),
    [
        (P(None, "a"), 2, 8, "`x` must have tokens that are not split; got them over ('a',)."),
        (P("a"), 3, 1, "`x` must have rows that 2 devices along ('a',) can share; got 3 in (3, 1, 16)."),
        (P("a"), 2, 1, "`states` must have slots that 2 devices along ('a',) can share; got 5 slots."),
        (P(None, None, ("a", "b")), 1, 1, "`x` must have channels that 6 devices along ('a', 'b') can share; got 16"),
        ("a", 2, 1, "`sharding` must be None, a NamedSharding or a PartitionSpec; got str."),
    ],
)
def test_errors_of_the_convolution(split, B, T, message):
    sharding = split if isinstance(split, str) else NamedSharding(make_mesh((2, 3), "automatic"), split)
    shapes = [spec(B, T, D), spec(5, W - 1, D), spec(D, W), spec(B, dtype=jnp.int32)]
    with pytest.raises(ValueError, match=re.escape(message)):
        jax.eval_shape(lambda x, s, w, at: causal_conv1d_update(x, s, w, state_indices=at, sharding=sharding), *shapes)


# Four chips of v6e with automatic axes, over which XLA divides no kernel by itself.
on_tpus = pytest.mark.skipif(not has_libtpu(), reason="needs libtpu")


def placed_shapes(mesh, tree, specs):
    """Return a tree of shapes that lie on the mesh as a tree of PartitionSpecs says."""
    place = lambda x, split: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, split))
    return jax.tree.map(place, tree, specs)


def on_all(mesh, tree):
    return placed_shapes(mesh, tree, jax.tree.map(lambda _: P(), tree))


def compile_on(mesh, run, *arguments, donated: int, **layouts):
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        return jax.jit(run, donate_argnums=donated, **layouts).trace(*arguments).lower().compile()


def step_shapes(N: int) -> layers.Step:
    indices, count = spec(N, dtype=jnp.int32), spec(dtype=jnp.int32)
    return layers.Step(spec(N + 1, dtype=jnp.int32), indices, spec(N, dtype=bool), count, count)


@on_tpus
@pytest.mark.tpu
def test_the_convolution_of_a_step_compiles_for_tpus():
    """The kernel runs on every chip for its channels, and a pool in rows is updated in place."""
    mesh, split = topology_mesh("v6e:2x2", "heads"), P(None, None, "heads")

    def run(x, pool, weight, step):
        return causal_conv1d_update(
            x, pool, weight, activation="silu", **step._asdict(), implementation="pallas",
            sharding=NamedSharding(mesh, split),
        )  # fmt: skip

    tensors = (spec(1, 256, 2048, dtype=jnp.bfloat16), spec(2048, W - 1, 2048, dtype=jnp.bfloat16), spec(2048, W))
    tensors = placed_shapes(mesh, tensors, (split, split, P("heads")))
    rows, step = pipeline.pool_formats(tensors[1]), on_all(mesh, step_shapes(8))
    given = tensors[0].sharding, rows, tensors[2].sharding, jax.tree.map(lambda y: y.sharding, step)
    program = compile_on(mesh, run, *tensors, step, donated=1, in_shardings=given, out_shardings=(None, rows))
    text = program.as_text()
    assert any(name.startswith("causal_conv1d_fwd") for name in launches(text))
    assert collectives(text) == []
    # A quarter of the pool has 6 MiB.
    assert program.memory_analysis().temp_size_in_bytes < 2**20


@on_tpus
@pytest.mark.tpu
def test_a_layer_compiles_for_tpus():
    """Decodes run as one kernel on every chip, a mixed step as several, and the last product is the only sum."""
    mesh, config = topology_mesh("v6e:2x2", "heads"), layers.GatedDeltaNetConfig(D=256, H=4, HV=8, K=128, V=128)
    on = layers.shardings(config, {"heads": "heads"}, mesh)
    weights = jax.eval_shape(lambda: layers.init_gated_delta_net(jax.random.key(0), config, jnp.bfloat16))
    pool = jax.eval_shape(lambda: layers.empty_cache(config, 16, jnp.bfloat16))

    def run(x, weights, pool, step):
        sharding = NamedSharding(mesh, on.values)
        return layers.ragged_gated_delta_net(x, weights, config, pool, step, implementation="fused", sharding=sharding)

    tensors = (spec(1, 256, config.D, dtype=jnp.bfloat16), weights, pool)
    tensors = placed_shapes(mesh, tensors, (on.x, on.weights, on.cache))
    program = compile_on(mesh, run, *tensors, on_all(mesh, step_shapes(8)), donated=2)
    text = program.as_text()
    steps = "recurrent_gated_delta_rule", "chunk_gated_delta_rule"
    for kernel in ("decode_layer", "causal_conv1d", *steps, "rms_norm_gated"):
        assert any(name.startswith(f"{kernel}_fwd") for name in launches(text)), kernel
    assert collectives(text) == ["all-reduce"]
