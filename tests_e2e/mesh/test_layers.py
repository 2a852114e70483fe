"""Layers over meshes of devices do what they do on one: rows, tokens and heads divided, and what they send."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding

from chunkwise import layers
from chunkwise.shared.testing.compare import assert_close
from tests.layer_oracle import LAYERS as ANY
from tests.shown import Shown, layer_of
from tests_e2e.mesh.meshes import MODES, P, collectives, make_mesh, normal

SIZES = dict(D=16, H=4, HV=4, K=8, V=8)
CONFIGS = {
    "gated_delta_net": layers.GatedDeltaNetConfig(**SIZES | dict(H=2)),
    "gated_delta_net2": layers.GatedDeltaNet2Config(**SIZES | dict(H=2)),
    "kimi_delta_attention": layers.KimiDeltaAttentionConfig(**SIZES, R=4),
    # One group: its norm is a mean over all devices of heads.
    "mamba2_mixer": layers.Mamba2Config(**SIZES | dict(H=1)),
    "mamba2_mixer_groups": layers.Mamba2Config(**SIZES | dict(HV=8)),
    # A group for every two heads: four devices have half of one.
    "mamba2_mixer_shared": layers.Mamba2Config(**SIZES | dict(H=2)),
    "lightning_attention": layers.LightningAttentionConfig(**SIZES),
    # Positions are counted over devices of tokens, and devices of heads have groups of their own.
    "lightning_attention_turned": layers.LightningAttentionConfig(
        **SIZES, qk_norm=True, frequencies=(1.0, 0.1), groups=4
    ),
    "comba_layer": layers.CombaConfig(**SIZES | dict(H=2)),
    "gated_linear_attention": layers.GatedLinearAttentionConfig(**SIZES | dict(H=2), R=4),
    "gated_delta_product": layers.GatedDeltaProductConfig(**SIZES | dict(H=2)),
    "rwkv7_attention": layers.Rwkv7AttentionConfig(**SIZES, R_decay=4, R_rate=4, R_gate=4),
}
LAYERS = {name: ANY["mamba2_mixer" if "mamba2" in name else name]._replace(config=x) for name, x in CONFIGS.items()}
SHOWS = dict.fromkeys(
    ("test_rows_tokens_and_heads", "test_a_serving_step"), lambda name: Shown(layer_of(CONFIGS[name]), "devices")
)
# Over devices of heads the last product of a layer is a sum, and so is the mean of a norm over all heads.
SUMS = dict.fromkeys(LAYERS, 1) | dict(mamba2_mixer=2, mamba2_mixer_shared=2, lightning_attention=2)
T = 24


def sent(name: str, mode: str) -> list[str]:
    """Return what a forward sends. XLA gathers the sums of heads where it may choose, which are few numbers too."""
    gathers = (name, mode) == ("mamba2_mixer_shared", "automatic")
    return ["all-gather", "all-reduce"] if gathers else ["all-reduce"] * SUMS[name]


# Rows with segments, and a row of documents, one of which is empty. Both end in padding.
PACKINGS = {
    "segments": dict(segment_ids=jnp.asarray([[*[0] * 9, *[1] * 10, *[2] * 5], [*[3] * 17, *[-1] * 7]], jnp.int32)),
    "documents": dict(cu_seqlens=jnp.asarray([0, 9, 9, 20, 22], jnp.int32)),
}


def inputs(layer, packing: str | None = None):
    """Return hidden states, weights and, for what is packed, a cache of every row or document."""
    config, documents = layer.config, packing == "documents"
    x = jax.random.normal(jax.random.key(1), (1 if documents else 2, T, config.D))
    weights = jax.jit(lambda: layer.init(jax.random.key(0), config))()
    if packing is None:
        return x, weights
    empty = layers.empty_cache(config, 4 if documents else 2)
    return x, weights, jax.tree.map(lambda y: jax.random.normal(jax.random.key(y.size), y.shape), empty)


def placed(mesh, values, specs):
    """Return a tree of arrays where a tree of PartitionSpecs says."""
    return jax.tree.map(lambda x, spec: jax.device_put(x, NamedSharding(mesh, spec)), values, specs)


def runner(layer, **options):
    """Return a function of hidden states, weights, a cache and a packing to hidden states and a cache."""
    return lambda x, weights, cache, packing: layer.run(x, weights, layer.config, cache, True, **packing, **options)


def with_gradients(run):
    """Return a function to results, and to the gradients of a loss of them all."""

    def loss(*arguments):
        results = run(*arguments)
        return sum(jnp.sum(jnp.sin(y)) for y in jax.tree.leaves(results)), results

    def both(*arguments):
        (_, results), gradients = jax.value_and_grad(loss, argnums=(0, 1, 2), has_aux=True)(*arguments)
        return results, gradients

    return jax.jit(both)


@functools.cache
def alone(name: str, packing: str):
    """Return results and gradients of a layer on one device."""
    return with_gradients(runner(LAYERS[name]))(*inputs(LAYERS[name], packing), PACKINGS[packing])


def assert_same(got, want) -> None:
    """Compare results and gradients."""
    for tolerance, a, b in zip((1e-5, 2e-5), got, want, strict=True):
        for (path, y), ref in zip(jax.tree.leaves_with_path(a), jax.tree.leaves(b), strict=True):
            assert_close(jax.tree_util.keystr(path), y, ref, tolerance)


QUICK_SHARED = (("mamba2_mixer_before", "3 over 4", "explicit"),)
QUICK_STEPS = (("mamba2_mixer_groups", "explicit"),)
THOROUGH = dict(
    # A layer below has values over devices, serving steps another, and steps of decodes a third.
    test_rows_tokens_and_heads=True,
    # Operators and convolutions are tested inside of maps.
    test_inside_a_shard_map=True,
    test_more_devices_than_key_heads=lambda name, shared, mode: (name, shared, mode) not in QUICK_SHARED,
    test_heads_send_one_sum=lambda name, mode: (name, mode) != ("mamba2_mixer_shared", "automatic"),
    test_a_serving_step=lambda name, mode: (name, mode) not in QUICK_STEPS,
)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("packing", PACKINGS)
@pytest.mark.parametrize("name", LAYERS)
def test_rows_tokens_and_heads(name, packing, mode):
    """Outputs, caches and all gradients over 8 devices are those of one, with documents across devices."""
    layer, packed, mesh = LAYERS[name], PACKINGS[packing], make_mesh((2, 2, 2), mode)
    arguments = inputs(layer, packing)
    # There is one row of documents, so its tokens get the devices of rows too.
    axes = dict(batch="a", tokens="b") if packing == "segments" else dict(tokens=("a", "b"))
    on = layers.shardings(layer.config, axes | dict(heads="c"), mesh)
    sharding = NamedSharding(mesh, on.values) if mode == "automatic" else None
    specs = dict(segment_ids=P(*on.x[:2]), cu_seqlens=P())
    put = placed(mesh, (*arguments, packed), (on.x, on.weights, on.cache, {name: specs[name] for name in packed}))
    with jax.set_mesh(mesh):
        got = with_gradients(runner(layer, sharding=sharding))(*put)
    assert_same(got, alone(name, packing))
    y, cache = got[0]
    assert normal(y.sharding.spec) == normal(on.x)
    assert normal(cache.state.sharding.spec) == normal(on.cache.state)


@pytest.mark.parametrize("packing", PACKINGS)
@pytest.mark.parametrize("name", LAYERS)
def test_inside_a_shard_map(name, packing):
    """A device calls the layer with its tokens; caches of rows lie with the rows, and those of documents everywhere."""
    layer, packed, mesh = LAYERS[name], PACKINGS[packing], make_mesh((2, 4), "automatic")
    arguments = inputs(layer, packing)
    rows, tokens = ("a", "b") if packing == "segments" else (None, ("a", "b"))
    x, cache = P(rows, tokens), P(rows)
    run = jax.shard_map(
        runner(layer, context_axis=tokens), mesh=mesh,
        in_specs=(x, P(), cache, x if packing == "segments" else P()), out_specs=(x, cache),
    )  # fmt: skip
    assert_same(with_gradients(run)(*arguments, packed), alone(name, packing))


# Key heads, value heads and a mesh of devices of heads, each of which shares a key head, or some of three. With two
# axes key heads are split over the first one, and repeated over the second.
SHARED = {
    "2 over 4": (dict(H=2, HV=8), (4,)),
    "2 over 8": (dict(H=2, HV=8), (8,)),
    "3 over 4": (dict(H=3, HV=12), (4,)),
    "2 over 2 times 4": (dict(H=2, HV=8), (2, 4)),
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("shared", SHARED)
@pytest.mark.parametrize("name", ["mamba2_mixer", "mamba2_mixer_before", "gated_delta_net", "gated_delta_net2"])
def test_more_devices_than_key_heads(name, shared, mode):
    """Key heads, which Mamba-2 calls groups, are repeated: outputs, caches and gradients are those of one device."""
    sizes, shape = SHARED[shared]
    layer, mesh = LAYERS[name.removesuffix("_before")], make_mesh(shape, mode)
    before = dict(norm="before") if name.endswith("_before") else {}
    layer = layer._replace(config=type(layer.config)(**SIZES | sizes | before))
    x, weights, cache = inputs(layer, "segments")
    # Each group has weights of the norm of its own.
    weights = jax.tree.map(lambda w: w + 0.1 * jax.random.normal(jax.random.key(w.size), w.shape), weights)
    on = layers.shardings(layer.config, {"heads": tuple(mesh.axis_names)}, mesh)
    sharding = NamedSharding(mesh, on.values) if mode == "automatic" else None
    want = with_gradients(runner(layer))(x, weights, cache, {})
    put = placed(mesh, (x, weights, cache), (on.x, on.weights, on.cache))
    with jax.set_mesh(mesh):
        got = with_gradients(runner(layer, sharding=sharding))(*put, {})
    assert_same(got, want)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    "name", ["gated_delta_net", "gated_delta_net2", "mamba2_mixer", "mamba2_mixer_shared", "rwkv7_attention"]
)
def test_heads_send_one_sum(name, mode):
    """Tensor parallelism: a forward sums what the last product makes, and the mean of a norm over all heads."""
    layer = LAYERS[name]
    x, weights = inputs(layer)
    mesh = make_mesh((4,), mode)
    # Four devices share value heads, which there are four of; fewer key heads are repeated.
    on = layers.shardings(layer.config, {"heads": "a"}, mesh)
    sharding = NamedSharding(mesh, on.values) if mode == "automatic" else None
    put = placed(mesh, (x, weights), (on.x, on.weights))
    run = lambda x, weights: layer.run(x, weights, layer.config, sharding=sharding)[0]
    with jax.set_mesh(mesh):
        program = jax.jit(run).lower(*put).compile()
        y = program(*put)
    assert collectives(program.as_text()) == sent(name, mode)
    assert_close("y", y, layer.run(x, weights, layer.config)[0], 1e-5)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", LAYERS)
def test_a_serving_step(name, mode):
    """The pool of a layer is divided by heads, and a step sends what a forward sends."""
    layer = LAYERS[name]
    x, weights = inputs(layer)
    pool, mesh = layers.empty_cache(layer.config, 5), make_mesh((4,), mode)
    on = layers.shardings(layer.config, {"heads": "a"}, mesh)
    sharding = NamedSharding(mesh, on.values) if mode == "automatic" else None
    at = layers.Step(np.array([0, 1, T], np.int32), np.array([3, 1], np.int32), np.array([False, False]), np.int32(1))

    def step(x, weights, pool, at, sharding=None):
        return layer.ragged(x, weights, layer.config, pool, at, sharding=sharding)

    wanted = jax.jit(step)(x[:1], weights, pool, at)
    put = placed(mesh, (x[:1], weights, pool), (on.x, on.weights, on.cache))
    with jax.set_mesh(mesh):
        program = jax.jit(functools.partial(step, sharding=sharding)).lower(*put, at).compile()
        got = program(*put, at)
    assert collectives(program.as_text()) == sent(name, mode)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)
