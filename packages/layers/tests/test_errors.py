"""Wrong use of a layer gets an error that names the argument."""

import dataclasses
import inspect
import re

import jax
import jax.numpy as jnp
import pytest

from chunkwise import layers
from chunkwise.layers import Step, empty_cache, gated_delta_net, ragged_gated_delta_net, shardings

CONFIG = layers.GatedDeltaNetConfig(D=8, H=2, HV=4, K=4, V=4)
X = jnp.zeros((2, 5, 8))


@pytest.fixture(scope="module")
def weights():
    return layers.init_gated_delta_net(jax.random.key(0), CONFIG)


INF, NAN = float("inf"), float("nan")
WRONG_CONFIGS = [
    ("GatedDeltaNet", dict(HV=3), "`HV` must be a multiple of `H`; got 3 and 2"),
    ("GatedDeltaNet", dict(H=0), "`H` must be a whole number above 0; got 0"),
    ("GatedDeltaNet", dict(K=4.0), "`K` must be a whole number above 0; got 4.0"),
    ("GatedDeltaNet", dict(W=9), "`W` must be from 2 to 8; got 9"),
    ("GatedDeltaNet", dict(eps=-1.0), "`eps` must be at least 0"),
    ("GatedDeltaNet", dict(eps=INF), "`eps` must be at least 0; got inf"),
    ("GatedDeltaNet", dict(eps="1e-6"), "`eps` must be at least 0; got '1e-6'"),
    ("GatedDeltaNet", dict(allow_neg_eigval=2), "`allow_neg_eigval` must be True or False"),
    ("GatedDeltaNet2", dict(allow_neg_eigval=2), "`allow_neg_eigval` must be True or False"),
    ("GatedDeltaNet2", dict(lower_bound=0.0), "`lower_bound` must be None or below 0"),
    ("KimiDeltaAttention", dict(lower_bound=1.0), "`lower_bound` must be None or below 0"),
    ("KimiDeltaAttention", dict(K=None), "`K` must be a whole number above 0; got None"),
    ("KimiDeltaAttention", dict(lower_bound=-INF), "`lower_bound` must be None or"),
    ("KimiDeltaAttention", dict(R=0), "`R` must be None or above 0"),
    ("KimiDeltaAttention", dict(R=1.5), "`R` must be None or above 0; got 1.5"),
    ("Mamba2", dict(dt_limit=(1.0, 0.5)), "`dt_limit` must rise from at least 0"),
    ("Mamba2", dict(dt_limit=(NAN, 1.0)), "`dt_limit` must rise from at least 0"),
    ("Mamba2", dict(dt_limit=5), "`dt_limit` must rise from at least 0; got 5"),
    ("Mamba2", dict(in_multiplier=NAN), "`in_multiplier` must be a finite number"),
    ("Mamba2", dict(multipliers=(NAN,) * 5), "`multipliers` must be a tuple of 5"),
    ("LightningAttention", dict(layer=1.5, layers=2), "`layer` must be a whole number; got 1.5"),
    ("LightningAttention", dict(layer=2, layers=2), "`layer` must be from 0 to 1; got 2"),
    ("LightningAttention", dict(frequencies=(1.0,), W=4), "`W` must be 2 for a layer with `frequencies`; got 4"),
    ("LightningAttention", dict(frequencies=(1.0,) * 3), "`frequencies` must be a tuple of at most 2 numbers"),
    ("LightningAttention", dict(groups=3), "`groups` must be None or a divisor of `HV`; got 3 and 4"),
    ("LightningAttention", dict(slope_factor=-1.0), "`slope_factor` must be None or at least 0; got -1.0"),
    ("GatedLinearAttention", dict(normalizer=0), "`normalizer` must be above 0; got 0"),
    ("GatedDeltaProduct", dict(num_householder=0), "`num_householder` must be a whole number"),
    ("GatedDeltaProduct", dict(forget_gate=None), "`forget_gate` must be True or False"),
    ("Rwkv7Attention", dict(), "`HV` must be `H`; got 4 and 2"),
    ("Rwkv7Attention", dict(H=4, W=4), "`W` must be 2, the tokens of a token shift; got 4"),
    ("Rwkv7Attention", dict(H=4, R_gate=0), "`R_gate` must be a whole number above 0; got 0"),
    ("Rwkv7Attention", dict(H=4, R_first=0), "`R_first` must be None or above 0; got 0"),
]


@pytest.mark.parametrize(("kind", "change", "message"), WRONG_CONFIGS)
def test_config(kind, change, message):
    with pytest.raises(ValueError, match=message):
        getattr(layers, f"{kind}Config")(**dict(D=8, H=2, HV=4, K=4, V=4) | change)


def test_random_weights_need_a_key():
    with pytest.raises(ValueError, match=r"`key` must be a key of `jax.random`, as `jax.random.key\(0\)`; got int"):
        layers.init_gated_delta_net(0, CONFIG)


@pytest.mark.parametrize(
    ("argument", "end"),
    [
        ("attention_mask", ": give it as `segment_ids`, int32, with `padding_id=0`; a serving step takes only real"),
        ("use_cache", ": call it `output_cache`."),
        ("segment_id", ". Did you mean 'segment_ids'?"),
        ("other", ""),
    ],
)
def test_arguments_of_another_name(weights, argument, end):
    """The signature shows the arguments that a layer has, and no others."""
    message = f"gated_delta_net() got an unexpected keyword argument '{argument}'{end}"
    with pytest.raises(TypeError, match=f"^{re.escape(message)}"):
        gated_delta_net(X, weights, CONFIG, **{argument: None})
    assert [*inspect.signature(gated_delta_net).parameters][-1] == "context_axis"
    with pytest.raises(TypeError, match=r"ragged_gated_delta_net\(\) got an unexpected keyword argument 'use_cache': "):
        ragged_gated_delta_net(X, weights, CONFIG, empty_cache(CONFIG, 1), None, use_cache=True)


def test_help_shows_the_types_of_what_a_layer_hands_on():
    shown = inspect.signature(layers.rwkv7_attention)
    assert shown.parameters["v_first"].annotation == jax.Array | None
    assert shown.return_annotation == tuple[jax.Array, layers.Cache | None, jax.Array]


def test_value_heads_of_kimi():
    """They may be left out, because every published model has as many of them as key heads."""
    assert layers.KimiDeltaAttentionConfig(D=8, H=2, K=4, V=6) == layers.KimiDeltaAttentionConfig(8, 2, 2, 4, 6)


@pytest.mark.parametrize("name", [name for name in layers.__all__ if name.endswith("Config")])
def test_configs_describe_their_sizes(name):
    kind = getattr(layers, name)
    described = re.findall(r"^ +(\w+(?:, \w+)*):", kind.__doc__, re.MULTILINE)
    assert {x.name for x in dataclasses.fields(kind)} == {name for names in described for name in names.split(", ")}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(x=jnp.zeros((2, 5, 9))), r"`x` must have shape \[B, T, D\] = \(any, any, 8\); got \(2, 5, 9\)"),
        (dict(weights=()), "`weights` must be GatedDeltaNetWeights; got tuple"),
        (dict(config=layers.Mamba2Config(8, 2, 4, 4, 4)), "`config` must be a GatedDeltaNetConfig; got Mamba2Config"),
        (dict(config=dict(D=8)), "`config` must be a GatedDeltaNetConfig; got dict"),
        (dict(cache=jnp.zeros(3)), "`cache` must be a Cache; got "),
        (dict(cache=empty_cache(layers.Mamba2Config(8, 2, 4, 3, 4), 2)), r"`cache.state` must have shape"),
        (dict(cache=empty_cache(layers.LightningAttentionConfig(8, 2, 4, 4, 4), 2)), "`cache.conv` must have 3 arrays"),
        (dict(cache=empty_cache(CONFIG, 3)), "`cache` must be of 2 sequences, as `x` is; got one of 3"),
        (dict(x=X[:1], cache=empty_cache(CONFIG, 3), cu_seqlens=jnp.array([0, 2, 5])), "`cache` must be of 2 sequence"),
        (dict(implementation="pallas"), "`implementation` must be"),
        (dict(output_cache=1), "`output_cache` must be True or False, known when the program is built; got 1"),
        (dict(sharding="x"), "`sharding` must be None, a NamedSharding or a PartitionSpec; got str"),
        (dict(padding_id=True), "`padding_id` must be a whole number; got True"),
    ],
)
def test_call(weights, change, message):
    arguments = dict(x=X, weights=weights, config=CONFIG) | change
    with pytest.raises((ValueError, NotImplementedError), match=message):
        gated_delta_net(**arguments)


def test_swapped_arguments(weights):
    with pytest.raises(ValueError, match="`config` must be a GatedDeltaNetConfig; got GatedDeltaNetWeights"):
        gated_delta_net(X, CONFIG, weights)
    with pytest.raises(ValueError, match=r"`x` must be an array \[B, T, D\]; got GatedDeltaNetWeights"):
        gated_delta_net(weights, X, CONFIG)
    with pytest.raises(ValueError, match="`config` must be a GatedDeltaNetConfig; got dict"):
        layers.load_gated_delta_net(CONFIG, checkpoint())
    with pytest.raises(ValueError, match="`config` must be a LayerConfig; got int"):
        empty_cache(2, CONFIG)


def test_serving_arguments(weights):
    pool, step = empty_cache(CONFIG, 3), Step(jnp.array([0, 5], jnp.int32), jnp.zeros(1, jnp.int32))
    run = lambda pool, step: ragged_gated_delta_net(X[:1], weights, CONFIG, pool, step)
    with pytest.raises(ValueError, match="`pool` must be a Cache; got Step"):
        run(step, pool)
    with pytest.raises(ValueError, match="`pool` must be a Cache; got NoneType"):
        run(None, step)
    with pytest.raises(ValueError, match="`step` must be a Step; got dict"):
        run(pool, step._asdict())
    with pytest.raises(ValueError, match=r"`step.state_indices` must be an int32 array; got None"):
        run(pool, step._replace(state_indices=None))
    with pytest.raises(ValueError, match=r"`pool.conv\[0\]` must have shape \[N, W-1, C\] = \(3, 3, 8\); got \(4,"):
        run(pool._replace(conv=empty_cache(CONFIG, 4).conv), step)


def test_weights_of_another_config(weights):
    with pytest.raises(ValueError, match=r"`weights.q` must have shape \(8, 8\); got \(8, 6\)"):
        gated_delta_net(X, weights._replace(q=weights.q[:, :6]), CONFIG)
    with pytest.raises(ValueError, match=r"`weights.conv` must have shape"):
        gated_delta_net(X, weights._replace(conv=weights.conv[:2]), CONFIG)
    with pytest.raises(ValueError, match=r"`weights.q` must be float32, bfloat16 or float16; got int32"):
        gated_delta_net(X, weights._replace(q=weights.q.astype(jnp.int32)), CONFIG)


def test_arrays_of_another_library_are_named(weights):
    tensor = type("Tensor", (), dict(shape=(8, 8), __module__="torch"))()
    with pytest.raises(ValueError, match=r"`weights.q` must be an array of JAX or numpy"):
        gated_delta_net(X, weights._replace(q=tensor), CONFIG)
    with pytest.raises(ValueError, match=r"`segment_ids` must be an array of JAX or numpy"):
        gated_delta_net(X, weights, CONFIG, segment_ids=tensor, padding_id=0)


def test_help_shows_the_call(weights):
    """Below the equations; the example runs."""
    example = inspect.getdoc(gated_delta_net).partition("\n\nDims:")[0].splitlines()[-1]
    named = dict(gated_delta_net=gated_delta_net, x=X, weights=weights, config=CONFIG)
    y, cache = eval(example.partition(" = ")[2], named)
    assert (y.shape, cache.state.shape) == (X.shape, (2, 4, 4, 4))
    assert "y, pool = ragged_gated_delta_net(x, weights, config, pool, step)" in inspect.getdoc(ragged_gated_delta_net)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: empty_cache(CONFIG, 1.5), "`N` must be a whole number above 0; got 1.5."),
        (lambda: empty_cache(CONFIG, 2, jnp.int8), "`dtype` must be one of ('float32', 'bfloat16', 'float16'); got "),
        (lambda: empty_cache(CONFIG, 2, state_dtype=jnp.int8), "`state_dtype` must be one of ('float32', "),
        (lambda: layers.empty_pool(CONFIG, 2, state_dtype="x"), "`state_dtype` must be one of ('float32', "),
        (lambda: layers.empty_pool(CONFIG, 2, decode_tokens=0), "`decode_tokens` must be a whole number above 0; got "),
        (lambda: layers.load_gated_delta_net({}, CONFIG, 3), "`prefix` must be a string; got int."),
        (lambda: layers.init_gated_delta_net(jax.random.key(0), CONFIG, "int4"), "`dtype` must be one of ('float32', "),
    ],
)
def test_sizes_and_types(call, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        call()


def test_calls_of_caches_and_weights(weights):
    """The example in the help of each function runs after the examples of those before it."""
    mesh = jax.make_mesh((1,), ("heads",))
    named = vars(layers) | dict(config=CONFIG, weights=weights, mesh=mesh, slots=jnp.arange(2), jax=jax, jnp=jnp)
    for name in (
        "empty_cache", "empty_pool", "read_cache", "write_cache", "cache_to_bytes", "cache_from_bytes", "shardings",
        "place", "init_gated_delta_net",
    ):  # fmt: skip
        call = re.search(r"The call is::\n\n    (.*)\n", inspect.getdoc(getattr(layers, name)))
        assert f"{name}(" in call[1]
        exec(call[1], named)
    assert named["pool"].state.replay == 16
    assert named["weights"].q.shape == weights.q.shape


def test_every_public_name_is_documented():
    assert [name for name in layers.__all__ if not getattr(layers, name).__doc__] == []


def checkpoint() -> dict:
    """Names and arrays as Qwen3.5 has them."""
    q, v = CONFIG.H * CONFIG.K, CONFIG.HV * CONFIG.V
    shapes = {
        "in_proj_qkv.weight": (2 * q + v, 8), "in_proj_z.weight": (v, 8), "in_proj_a.weight": (4, 8),
        "in_proj_b.weight": (4, 8), "conv1d.weight": (2 * q + v, 1, 4), "A_log": (4,), "dt_bias": (4,),
        "norm.weight": (4,), "out_proj.weight": (8, v),
    }  # fmt: skip
    return {f"layer.{name}": jnp.ones(shape, jnp.bfloat16) for name, shape in shapes.items()}


def test_checkpoint():
    read = lambda named: layers.load_gated_delta_net(named, CONFIG, "layer.")
    weights = read(checkpoint() | {"another": jnp.ones(3)})
    assert weights.q.dtype == jnp.bfloat16
    assert weights.A_log.dtype == weights.dt_bias.dtype == jnp.float32
    without = {name: x for name, x in checkpoint().items() if "norm" not in name}
    message = r"`named` must have 'layer\.norm' or 'layer\.norm\.weight'; got neither, but"
    with pytest.raises(ValueError, match=message + r" \['layer.A_log', .*, 'layer.out_proj.weight'\]"):
        read(without)
    with pytest.raises(ValueError, match=message + r" \['layer\.nrom\.weight'\]"):
        read(without | {"layer.nrom.weight": jnp.ones(4)})
    with pytest.raises(ValueError, match=r"`named` must have 'layer.A_log' of shape \(4,\), as `config` asks for"):
        read(checkpoint() | {"layer.A_log": jnp.ones(5)})
    with pytest.raises(ValueError, match=r"no weights that the layer lacks; got \['out_proj.bias'\]"):
        read(checkpoint() | {"layer.out_proj.bias": jnp.ones(8)})
    with pytest.raises(
        ValueError, match=r"names that start with 'other\.'; got none, but \['layer\.', 'layer\.conv1d\.'"
    ):
        layers.load_gated_delta_net(checkpoint(), CONFIG, "other.")
    with pytest.raises(ValueError, match="`named` must be a mapping from names to arrays; got list"):
        layers.load_gated_delta_net(list(checkpoint()), CONFIG)


def test_shardings():
    with pytest.raises(ValueError, match=r"`mesh_axes` must have keys of \('batch', 'tokens', 'heads'\); got \("):
        shardings(CONFIG, {"model": "x"})
    mesh = jax.sharding.AbstractMesh((3,), ("x",))
    with pytest.raises(ValueError, match=r"`HV` must be a multiple of the devices along \('x',\); got 4"):
        shardings(CONFIG, {"heads": "x"}, mesh)
    with pytest.raises(ValueError, match="`config` must be that of a layer; got dict"):
        shardings({}, {})


def test_a_bias_that_the_config_does_not_have():
    config = layers.Mamba2Config(8, 2, 4, 4, 4)
    weights = layers.init_mamba2_mixer(jax.random.key(0), config)._replace(bias=())
    with pytest.raises(ValueError, match=r"`weights\.bias` must have shape"):
        layers.mamba2_mixer(X, weights, config)
