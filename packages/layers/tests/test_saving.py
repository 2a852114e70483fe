"""The way back: weights become arrays of a checkpoint and files, from which the same bits are loaded."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from chunkwise import layers
from tests.shown import Shown

D = 24
GDN, KIMI = layers.GatedDeltaNetConfig(D, 2, 4, 8, 16), layers.KimiDeltaAttentionConfig
LAYERS = {
    "gated_delta_net": dict.fromkeys(
        ("qwen3_5", "qwen3_5_moe_text", "qwen3_next", "qwen4_exp", "lara_mini", "olmo_hybrid", "gated_deltanet", None),
        GDN,
    ),
    "kimi_delta_attention": {
        "kimi_linear": KIMI(D, 2, 2, 8, 8, R=8), "kimi_k3": KIMI(D, 2, 2, 8, 8, R=8, full_rank_gate=True),
        "bailing_hybrid": KIMI(D, 2, 2, 8, 8), "glm5_next_text": KIMI(D, 2, 2, 8, 8, R=8), None: KIMI(D, 2, 4, 8, 8),
        "kda": KIMI(D, 2, 4, 8, 16, R=16, gate_bias=True),
    },
    "gated_delta_net2": {"gdn2": layers.GatedDeltaNet2Config(D, 2, 4, 8, 8)},
    "mamba2_mixer": {
        None: layers.Mamba2Config(D, 2, 4, 8, 16),
        "zamba2": layers.Mamba2Config(D, 2, 4, 8, 16, norm=None, conv_bias=False),
        "falcon_h1": layers.Mamba2Config(
            D, 2, 4, 8, 16, in_bias=True, out_bias=True, in_multiplier=0.3, multipliers=(0.7, 0.3, 0.11, 0.9, 1.7)
        ),
    },
    "comba_layer": {
        "comba": layers.CombaConfig(D, 2, 4, 8, 16), None: layers.CombaConfig(D, 2, 4, 8, 16, output_gate=False),
    },
    "gated_linear_attention": {"gla": layers.GatedLinearAttentionConfig(D, 2, 4, 8, 16, R=4)},
    "mlstm_layer": {None: layers.MlstmLayerConfig(D, 4, 4, 8, 16)},
    "gated_delta_product": {
        None: layers.GatedDeltaProductConfig(D, 2, 4, 8, 16, num_householder=3),
        "gated_deltaproduct": layers.GatedDeltaProductConfig(D, 2, 4, 8, 16, num_householder=1, forget_gate=False),
        "delta_net": layers.GatedDeltaProductConfig(
            D, 2, 4, 8, 16, num_householder=1, forget_gate=False, output_gate=False
        ),
    },
    "rwkv7_attention": {
        "rwkv7": layers.Rwkv7AttentionConfig(D, 3, 3, 8, 8, R_decay=4, R_rate=5, R_gate=6, R_first=7),
        "rwkv7_fla": layers.Rwkv7AttentionConfig(D, 3, 3, 8, 16, R_decay=4, R_rate=5, R_gate=6),
        "rwkv_x070": layers.Rwkv7AttentionConfig(D, 3, 3, 8, 8, R_decay=4, R_rate=5, R_gate=6, R_first=7),
        None: layers.Rwkv7AttentionConfig(D, 3, 3, 8, 8, R_decay=4, R_rate=5, R_gate=6, R_first=7),
    },
    "lightning_attention": {
        None: layers.LightningAttentionConfig(D, 4, 4, 8, 8, layer=1, layers=3),
        "bailing_moe_linear": layers.LightningAttentionConfig(D, 4, 4, 8, 8, qk_norm=True, groups=2),
        "bailing_hybrid": layers.LightningAttentionConfig(D, 4, 4, 8, 8),
        "minicpm_sala": layers.LightningAttentionConfig(D, 4, 4, 8, 8, qk_norm=True, groups=None, gate=False),
    },
}  # fmt: skip
CASES = [(name, model) for name, models in LAYERS.items() for model in models]
SHOWS = dict(test_to_the_bit=lambda name, model: Shown(name, "load save", model and model.removesuffix("_text")))
QWEN = "model.layers.0.linear_attn."


def random_weights(name, config):
    """Weights in which no two numbers of an array are alike, biases and norms included."""
    weights = jax.eval_shape(lambda: getattr(layers, f"init_{name}")(jax.random.key(0), config, jnp.bfloat16))
    draw = np.random.default_rng(0).standard_normal
    return jax.tree.map(lambda x: jnp.asarray(draw(x.shape), x.dtype), weights)


def assert_same(weights, expected):
    assert jax.tree.structure(weights) == jax.tree.structure(expected)
    for x, y in zip(jax.tree.leaves(weights), jax.tree.leaves(expected), strict=True):
        assert x.dtype == y.dtype
        assert np.asarray(x).tobytes() == np.asarray(y).tobytes()


@pytest.mark.parametrize(("name", "model"), CASES)
def test_to_the_bit(tmp_path, name, model):
    """Through a file, under a prefix, beside other arrays."""
    config = LAYERS[name][model]
    weights = random_weights(name, config)
    named = getattr(layers, f"save_{name}")(weights, config, QWEN, model)
    assert all(key.startswith(QWEN) for key in named)
    layers.save_checkpoint(tmp_path, named | {"model.norm.weight": np.ones(3, np.float32)})
    read = layers.open_checkpoint(tmp_path)
    assert set(read) == {*named, "model.norm.weight"}
    assert_same(getattr(layers, f"load_{name}")(read, config, QWEN), weights)


@pytest.mark.parametrize(("name", "model"), CASES)
def test_wrong_checkpoint(name, model):
    """A name that is missing, whichever it is, a name too many, and an array of another shape."""
    config = LAYERS[name][model]
    named = getattr(layers, f"save_{name}")(random_weights(name, config), config, QWEN, model)
    load = lambda named: getattr(layers, f"load_{name}")(named, config, QWEN)
    for key, x in named.items():
        others = {other: y for other, y in named.items() if other != key}
        with pytest.raises(ValueError, match=r"`named` must have '.*'; got neither, but \["):
            load(others)
        # A decay may have zeros behind it.
        with pytest.raises(ValueError, match=r"`named` must have '.*' (of shape \(|with zeros after)"):
            load(others | {key: np.ones((*x.shape[:-1], x.shape[-1] + 1))})
    with pytest.raises(ValueError, match=r"no weights that the layer lacks; got \['k_conv1d\.other'\]"):
        load(named | {f"{QWEN}k_conv1d.other": np.zeros(3)})


@pytest.mark.parametrize("V", [16, 8])
def test_convolutions_in_three_chunks(V):
    """As transformers saves OLMo-hybrid: the last chunk of all channels may be smaller."""
    config = layers.GatedDeltaNetConfig(D, 4, 4, 8, V, eps=1e-5)
    weights = random_weights("gated_delta_net", config)
    named = layers.save_gated_delta_net(weights, config, model="olmo_hybrid")
    whole = np.concatenate([named[f"{name}_conv1d.weight"] for name in "qkv"])
    part = -(-len(whole) // 3)
    named |= {f"{name}_conv1d.weight": whole[i * part : (i + 1) * part] for i, name in enumerate("qkv")}
    assert_same(layers.load_gated_delta_net(named, config), weights)


def test_a_file_of_float8_comes_back_as_bfloat16(tmp_path):
    weights = random_weights("gated_delta_net", GDN)
    named = layers.save_gated_delta_net(weights, GDN, QWEN)
    for name in ("in_proj_qkv.weight", "out_proj.weight"):
        named[QWEN + name] = named[QWEN + name].astype(jnp.float8_e4m3fn)
        named[QWEN + name + "_scale"] = np.full(len(named[QWEN + name]), 0.37, jnp.bfloat16)
    layers.save_checkpoint(tmp_path / "float8", named)
    read = layers.load_gated_delta_net(layers.open_checkpoint(tmp_path / "float8"), GDN, QWEN)
    assert read.q.dtype == read.out.dtype == jnp.bfloat16
    layers.save_checkpoint(tmp_path / "plain", layers.save_gated_delta_net(read, GDN, QWEN))
    plain = layers.open_checkpoint(tmp_path / "plain")
    assert not [name for name in plain if "scale" in name]
    assert_same(layers.load_gated_delta_net(plain, GDN, QWEN), read)


def test_files(tmp_path):
    """Arrays of any kind and type, in files of at most so many bytes, which the first one has, and an index."""
    named = {
        "a": np.arange(6, dtype=np.float32).reshape(2, 3).T, "b": jnp.ones(3, jnp.bfloat16), "c": np.float32(7),
        "d": np.zeros((2, 2), bool), "f": np.ones(2, jnp.float8_e5m2), "f_scale": np.float32(2),
    }  # fmt: skip
    named = {"e": np.arange(40, dtype=np.int64), **named}
    layers.save_checkpoint(str(tmp_path / "new" / "folder"), named, shard_bytes=38)
    files = sorted(path.name for path in (tmp_path / "new" / "folder").iterdir())
    assert files == [f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)] + ["model.safetensors.index.json"]
    index = json.loads((tmp_path / "new" / "folder" / files[-1]).read_text())
    assert index["weight_map"]["e"] == files[0]
    assert index["metadata"]["total_size"] == sum(np.asarray(x).nbytes for x in named.values())
    read = layers.open_checkpoint(tmp_path / "new" / "folder")
    for name in "abcde":
        assert read[name].dtype == named[name].dtype
        np.testing.assert_array_equal(read[name], named[name])
    assert read["f"].tolist() == [2, 2]


@pytest.mark.parametrize(
    ("named", "message"),
    [
        ({}, "`named` must be a mapping from names to arrays, and not empty; got dict"),
        ([1], "`named` must be a mapping from names to arrays, and not empty; got list"),
        ({3: np.ones(2)}, r"`named` must have names that are strings, .*; got \[3\]"),
        ({"__metadata__": np.ones(2)}, "`named` must have names that are strings, and not '__metadata__'"),
        ({"a": np.ones(2, jnp.int4)}, "`named` must have arrays of types of the format safetensors; got int4 for 'a'"),
        ({"a": np.ones(2, np.complex64)}, "types of the format safetensors; got complex64 for 'a'"),
        ({"a": [1.0, 2.0]}, "types of the format safetensors; got list for 'a'"),
        ({"a": np.ones(2, jnp.float4_e2m1fn)}, r"types of the format safetensors; got \['float4_e2m1fn'\]"),
    ],
)
def test_what_no_file_can_have(tmp_path, named, message):
    with pytest.raises(ValueError, match=message):
        layers.save_checkpoint(tmp_path, named)
    assert not [*tmp_path.iterdir()]


def test_wrong_arguments(tmp_path):
    layers.save_checkpoint(tmp_path, {"a": np.ones(2)})
    with pytest.raises(ValueError, match=r"a folder without a checkpoint; .* has \['model.safetensors'\]"):
        layers.save_checkpoint(tmp_path, {"a": np.ones(2)})
    with pytest.raises(ValueError, match=r"`shard_bytes` must be a whole number above 0; got 0\.5"):
        layers.save_checkpoint(tmp_path / "other", {"a": np.ones(2)}, shard_bytes=0.5)
    weights = random_weights("gated_delta_net", GDN)
    with pytest.raises(ValueError, match=r"`model` must be None or one of \('qwen3_5', .*\); got 'mamba2'"):
        layers.save_gated_delta_net(weights, GDN, model="mamba2")
    with pytest.raises(ValueError, match=r"`weights.q` must have shape \(24, 16\); got \(24, 15\)"):
        layers.save_gated_delta_net(weights._replace(q=weights.q[:, 1:]), GDN)
    with pytest.raises(ValueError, match="`config` must be that of a layer; got dict"):
        layers.decayed({})


@pytest.mark.parametrize(("name", "model"), CASES)
def test_weights_that_decay(name, model):
    """The tree has the structure of the weights, whatever parts a layer has."""
    config = LAYERS[name][model]
    weights, mask = random_weights(name, config), layers.decayed(config)
    assert jax.tree.structure(mask) == jax.tree.structure(weights)
    kept = {field for field, part in zip(mask._fields, mask, strict=True) if not all(jax.tree.leaves(part))}
    some = {field for field, part in zip(mask._fields, mask, strict=True) if any(jax.tree.leaves(part))}
    vectors = {"A_log", "dt_bias", "skip", "norm", "bias", "z_bias", "in_bias", "out_bias", "i_bias", "f_bias"}
    # Of RWKV-7 the large projections alone decay.
    vectors |= {"decay", "rate", "first", "gate", "decay_bias", "rate_bias", "first_bias", "norm_bias"}
    vectors |= {"qk_norm", "mix", "k_k", "k_a", "r_k"}
    assert kept <= vectors
    assert not some & vectors
    assert {field for field in ("A_log", "dt_bias", "skip") if jax.tree.leaves(getattr(mask, field, ()))} <= kept
