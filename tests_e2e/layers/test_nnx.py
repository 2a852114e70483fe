"""The layers as modules of flax: training, stacked layers, caches, checkpoints, and weights on a mesh."""

import dataclasses
import inspect
import re
import textwrap

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from chunkwise import layers
from chunkwise.integrations.nnx import GatedDeltaNet, GatedDeltaNet2, GatedDeltaProduct, Rwkv7Attention, named, place
from chunkwise.shared.testing.compare import assert_close
from tests.nnx_modules import CONFIGS

KINDS = pytest.mark.parametrize("kind", CONFIGS, ids=lambda kind: kind.__name__)
X = jax.random.normal(jax.random.key(1), (2, 12, 16))
THOROUGH = dict(
    test_a_module_is_the_layer=lambda kind: kind in (GatedDeltaNet2, GatedDeltaProduct),
    test_stacked_layers_train=True,
)


@KINDS
def test_a_module_is_the_layer(kind):
    """New weights are those of the layer, one attribute each; a prompt in pieces gives what it gives as a whole."""
    config = CONFIGS[kind]
    module = kind(config, rngs=nnx.Rngs(0))
    weights = kind.init(nnx.Rngs(0).params(), config)
    paths = [path for path, _ in nnx.to_flat_state(nnx.state(module, nnx.Param))]
    assert sorted(paths) == sorted((name,) for name in named(weights))
    jax.tree.map(np.testing.assert_array_equal, module.weights, weights)
    whole = kind.run(X, weights, config)[0]
    module.init_cache(2)
    # RWKV-7 returns its values, too.
    first = lambda results: results if isinstance(results, jax.Array) else results[0]
    step = nnx.jit(lambda module, x: first(module(x, decode=True)))
    pieces = jnp.concatenate([step(module, X[:, :5]), step(module, X[:, 5:6]), step(module, X[:, 6:])], axis=1)
    assert_close("whole", first(module(X)), whole, 1e-6)
    assert_close("pieces", pieces, whole, 1e-5)
    module.init_cache(2)
    np.testing.assert_array_equal(step(module, X[:, :5]), pieces[:, :5])


@KINDS
def test_help_names_every_argument(kind):
    """`help()` of a module has its arguments, of a call too, although all modules share them."""
    for function in (kind, kind.__call__, kind.init_cache):
        names = inspect.signature(function).parameters.keys() - {"self"}
        described = inspect.getdoc(function).partition("Args:")[2]
        assert names, "the signature must be that of the module and not of flax's class of modules"
        assert not [name for name in names if not re.search(rf"^  ( *\w+,)* *{name}[:,]", described, re.MULTILINE)]


@pytest.mark.parametrize("kind", [GatedDeltaNet, Rwkv7Attention])
def test_help_shows_the_calls(kind):
    """They run; RWKV-7 returns its values, too."""
    calls = re.search(r"::\n\n((?:    .*\n)+)", inspect.getdoc(kind))[1]
    named = dict(nnx=nnx, config=CONFIGS[kind], x=X) | {kind.__name__: kind}
    exec(textwrap.dedent(calls), named)
    assert named["y"].shape == X.shape


def test_values_of_the_first_layer():
    """Modules of RWKV-7 hand them on; the first one takes none."""
    first, later = CONFIGS[Rwkv7Attention], dataclasses.replace(CONFIGS[Rwkv7Attention], R_first=4)
    modules = [Rwkv7Attention(config, rngs=nnx.Rngs(0)) for config in (first, later)]
    run = nnx.jit(lambda modules, x: modules[1](*modules[0](x)))
    y, v_first = run(modules, X)
    x, _, want = layers.rwkv7_attention(X, modules[0].weights, first)
    assert_close("y", y, layers.rwkv7_attention(x, modules[1].weights, later, v_first=want)[0], 1e-6)
    np.testing.assert_array_equal(v_first, want)
    with pytest.raises(ValueError, match="`v_first` must be the values that the first layer returned; got None"):
        modules[1](X)


def test_documents_and_weights_of_a_checkpoint():
    config = CONFIGS[GatedDeltaNet]
    weights = layers.init_gated_delta_net(jax.random.key(0), config)
    module = GatedDeltaNet(config, weights)
    ids = jnp.asarray([[0] * 5 + [1] * 7, [0] * 12], jnp.int32)
    want = layers.gated_delta_net(X, weights, config, segment_ids=ids)[0]
    assert_close("y", module(X, segment_ids=ids), want, 1e-6)


def stack(kind, count, **options):
    """Return modules with one more dimension, and a function that runs them one after another."""
    axes = dict(transform_metadata={nnx.PARTITION_NAME: None})

    @nnx.split_rngs(splits=count)
    @nnx.vmap(in_axes=0, out_axes=0, **axes)
    def make(rngs):
        return kind(CONFIGS[kind], rngs=rngs, **options)

    @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry, **axes)
    @nnx.remat
    def run(x, module):
        return x + module(x)

    return make(nnx.Rngs(0)), run


def test_stacked_layers_train():
    """Layers in nnx.scan and remat have the gradients of a loop, and an optimiser of optax takes them."""
    modules, run = stack(GatedDeltaNet, 2)
    loss = lambda modules, x: jnp.mean(run(x, modules) ** 2)
    value, gradients = nnx.jit(nnx.value_and_grad(loss))(modules, X)
    weights = modules.weights

    def plain(weights):
        x = X
        for i in range(2):
            x = x + layers.gated_delta_net(x, jax.tree.map(lambda w, i=i: w[i], weights), CONFIGS[GatedDeltaNet])[0]
        return jnp.mean(x**2)

    want = jax.jit(jax.grad(plain))(weights)
    for name, ref in named(want).items():
        assert_close(name, gradients[name].get_value(), ref, 1e-5)
    optimizer = nnx.Optimizer(modules, optax.sgd(0.1), wrt=nnx.Param)
    optimizer.update(modules, gradients)
    assert loss(modules, X) < value


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=["automatic", "explicit"])
def test_one_device_in_a_mesh(kind):
    """The same program runs without a mesh and with axes of both kinds; weights lie where their specs say."""
    module = GatedDeltaNet(CONFIGS[GatedDeltaNet], rngs=nnx.Rngs(0), mesh_axes=dict(batch="data", heads="model"))
    want = module(X)
    mesh = jax.make_mesh((1, 1), ("data", "model"), axis_types=(kind,) * 2)
    with jax.set_mesh(mesh):
        module = GatedDeltaNet(module.config, rngs=nnx.Rngs(0), mesh_axes=dict(batch="data", heads="model"))
        y = nnx.jit(lambda module, x: module(x))(module, place(X, mesh, PartitionSpec("data")))
        state = nnx.state(module, nnx.Param)
        specs = nnx.get_partition_spec(state)
    assert_close("y", y, want, 1e-6)
    assert specs["out"].get_value() == PartitionSpec("model", None)
    again = place(jax.tree.map(np.asarray, state), mesh, specs)
    assert again["out"].get_value().sharding == NamedSharding(mesh, PartitionSpec("model", None))


def test_place_takes_a_spec_for_a_part():
    mesh = jax.make_mesh((1,), ("model",))
    placed = place({"a": np.ones(2), "b": [np.ones(2), np.ones(3)]}, mesh, {"a": PartitionSpec("model"), "b": None})
    assert placed["a"].sharding.spec == PartitionSpec("model")
    assert [x.sharding.spec for x in placed["b"]] == [PartitionSpec()] * 2


def test_errors():
    config = CONFIGS[GatedDeltaNet]
    with pytest.raises(ValueError, match="`rngs` must be given where `weights` is not, and only there"):
        GatedDeltaNet(config)
    with pytest.raises(ValueError, match="`decode` must be False before `init_cache`; got True"):
        GatedDeltaNet(config, rngs=nnx.Rngs(0))(X, decode=True)
    with (
        jax.set_mesh(jax.make_mesh((1,), ("a",))),
        pytest.raises(ValueError, match=r"`mesh_axes` must name axes of the mesh \('a',\); got {'heads': 'b'}\."),
    ):
        GatedDeltaNet(config, rngs=nnx.Rngs(0), mesh_axes=dict(heads="b"))


def test_weights_are_checked_where_a_module_is_made():
    """The streams of random numbers are no weights, and weights of another config have other shapes."""
    config = CONFIGS[GatedDeltaNet]
    with pytest.raises(ValueError, match=r"^`weights` must be GatedDeltaNetWeights; got Rngs\.$"):
        GatedDeltaNet(config, nnx.Rngs(0))
    other = layers.init_gated_delta_net(jax.random.key(0), dataclasses.replace(config, V=2 * config.V))
    with pytest.raises(ValueError, match=r"^`weights\.\w+` must have shape .*; got .*\.$"):
        GatedDeltaNet(config, other)


@KINDS
def test_errors_name_the_module(kind):
    with pytest.raises(TypeError, match=rf"^{kind.__name__}\.__init__\(\) got an unexpected keyword argument 'seed'"):
        kind(CONFIGS[kind], seed=0)
    with pytest.raises(TypeError, match=rf"^{kind.__name__}\.__call__\(\) got an unexpected keyword argument 'mask'"):
        kind(CONFIGS[kind], rngs=nnx.Rngs(0))(X, mask=None)
