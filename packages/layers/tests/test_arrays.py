"""Arrays of a checkpoint: weights of 8 bits with their scales, tensors of torch, and fused names."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from chunkwise import layers

D = 40
CONFIG = layers.GatedDeltaNetConfig(D, 2, 4, 16, 16)
Q, V = CONFIG.H * CONFIG.K, CONFIG.HV * CONFIG.V
RANDOM = np.random.default_rng(0)
# What the format safetensors calls a type.
NAMES = dict(
    float32="F32", bfloat16="BF16", float8_e4m3fn="F8_E4M3", float8_e5m2="F8_E5M2", float8_e8m0fnu="F8_E8M0",
    int8="I8", uint8="U8", int32="I32",
)  # fmt: skip


def draw(*shape, dtype="bfloat16"):
    return RANDOM.standard_normal(shape).astype(jnp.dtype(dtype))


def qwen3_5() -> dict:
    return {
        "in_proj_qkv.weight": draw(2 * Q + V, D), "in_proj_z.weight": draw(V, D), "in_proj_a.weight": draw(4, D),
        "in_proj_b.weight": draw(4, D), "A_log": draw(4, dtype="float32"), "dt_bias": draw(4),
        "conv1d.weight": draw(2 * Q + V, 1, 4), "norm.weight": draw(16), "out_proj.weight": draw(D, V),
    }  # fmt: skip


def qwen3_next() -> dict:
    named = qwen3_5()
    for name in "qkv", "z", "a", "b":
        del named[f"in_proj_{name}.weight"]
    return named | {"in_proj_qkvz.weight": draw(2 * Q + 2 * V, D), "in_proj_ba.weight": draw(8, D)}


def blocks(size: int, width: int) -> int:
    return -(-size // width)


def quantize(named: dict, names, kind="float8_e4m3fn", way="blocks", block=(32, 16), scale_type="float32"):
    """Return a checkpoint with these matrices in 8 bits, and one with the numbers that they stand for, in float64."""
    coded, plain = dict(named), dict(named)
    for name in names:
        shape = named[name].shape
        x = RANDOM.integers(-100, 100, shape).astype(np.float32).astype(jnp.dtype(kind))
        sizes = dict(
            blocks=tuple(map(blocks, shape, block)), rows=(shape[0], 1), flat_rows=shape[:1], tensor=(), one=(1,),
            four=(blocks(shape[0], block[0]), 1, blocks(shape[1], block[1]), 1),
        )[way]  # fmt: skip
        scale = np.asarray(2.0 ** RANDOM.integers(-9, 3, sizes)).astype(jnp.dtype(scale_type))
        if scale_type == "uint8":
            scale = np.asarray(RANDOM.integers(118, 130, sizes), np.uint8)
        coded[name], coded[name + ("_scale_inv" if way == "blocks" else "_scale")] = x, scale
        wide = 2.0 ** (scale.astype(np.float64) - 127) if scale_type == "uint8" else scale.astype(np.float64)
        expected = np.zeros(shape)
        for i, j in np.ndindex(*shape):
            at = dict(
                blocks=(i // block[0], j // block[1]), rows=(i, 0), flat_rows=(i,), tensor=(), one=(0,),
                four=(i // block[0], 0, j // block[1], 0),
            )[way]  # fmt: skip
            expected[i, j] = float(x[i, j]) * wide[at]
        plain[name] = expected.astype(np.float32)
    return coded, plain


def save(directory, named: dict, config: dict | None = None):
    """Write a file of the format safetensors, as its description has it."""
    header, data = {"__metadata__": {"format": "pt"}}, b""
    for name, x in named.items():
        part = np.ascontiguousarray(x).tobytes()
        offsets = [len(data), len(data) + len(part)]
        header[name] = dict(dtype=NAMES[str(x.dtype)], shape=list(x.shape), data_offsets=offsets)
        data += part
    text = json.dumps(header).encode()
    (directory / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + data)
    if config is not None:
        (directory / "config.json").write_text(json.dumps(config))


def same(weights, expected):
    for have, want in zip(weights, expected, strict=True):
        for x, y in zip(have, want, strict=True) if isinstance(have, tuple) else [(have, want)]:
            np.testing.assert_array_equal(np.asarray(x, np.float32), np.asarray(y, np.float32))


WIDE = {qwen3_5: ("in_proj_qkv", "in_proj_z", "out_proj"), qwen3_next: ("in_proj_qkvz", "out_proj")}


@pytest.mark.parametrize("kind", ["float8_e4m3fn", "float8_e5m2", "int8"])
@pytest.mark.parametrize("way", ["blocks", "rows", "flat_rows", "tensor", "one", "four"])
@pytest.mark.parametrize("layout", WIDE)
def test_scales(layout, way, kind):
    """The layouts of Qwen3-Next-FP8 and of Qwen3.5-FP8, whose gates stay in bfloat16."""
    coded, plain = quantize(layout(), [f"{name}.weight" for name in WIDE[layout]], kind, way)
    weights = layers.load_gated_delta_net(coded, CONFIG)
    same(weights, layers.load_gated_delta_net(plain, CONFIG))
    assert weights.q.dtype == jnp.float32
    assert weights.b.dtype == jnp.bfloat16


@pytest.mark.parametrize("scale_type", ["bfloat16", "float8_e8m0fnu", "uint8"])
def test_types_of_scales(scale_type):
    """Whole numbers are exponents."""
    coded, plain = quantize(qwen3_5(), ["out_proj.weight"], scale_type=scale_type)
    weights = layers.load_gated_delta_net(coded, CONFIG)
    assert weights.out.dtype == "bfloat16"
    same(weights, layers.load_gated_delta_net(plain, CONFIG))


@pytest.mark.parametrize("block", [(32, 16), (24, 12)])
def test_a_checkpoint_of_8_bits(tmp_path, block):
    """Blocks of any size are read where config.json says it; the scales are no names of the mapping."""
    coded, plain = quantize(qwen3_5(), ["in_proj_qkv.weight", "out_proj.weight"], block=block)
    quantization = dict(quant_method="fp8", weight_block_size=block, modules_to_not_convert=["lm_head"])
    save(tmp_path, coded | {"in_proj_qkv.input_scale": draw(dtype="float32")}, dict(quantization_config=quantization))
    named = layers.open_checkpoint(tmp_path)
    assert set(named) == set(plain)
    assert len(named) == len(plain)
    same(layers.load_gated_delta_net(named, CONFIG), layers.load_gated_delta_net(plain, CONFIG))


def test_scales_that_no_config_describes(tmp_path):
    coded, _ = quantize(qwen3_5(), ["in_proj_qkv.weight"])
    save(tmp_path, coded)
    with pytest.raises(ValueError, match=r"`directory` must have config.json with .* 'in_proj_qkv.weight_scale_inv'"):
        layers.load_gated_delta_net(layers.open_checkpoint(tmp_path), CONFIG)


def test_blocks_of_stacked_experts():
    from chunkwise.layers.checkpoint.arrays import Numbers

    x, scale = draw(3, 40, 24, dtype="float8_e4m3fn"), draw(3, 2, 2, dtype="float32")
    wide = np.repeat(np.repeat(scale, 32, 1), 16, 2)[:, :40, :24]
    made = Numbers({"gate_up_proj": x, "gate_up_proj_scale_inv": scale})
    assert list(made) == ["gate_up_proj"]
    np.testing.assert_array_equal(made["gate_up_proj"], x.astype(np.float32) * wide)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"out_proj.weight": np.ones((D, V), jnp.float8_e4m3fn)},
         r"`named` must have 'out_proj.weight_scale_inv' or 'out_proj.weight_scale' for 'out_proj.weight' of float8"),
        ({"out_proj.weight": np.ones((D, V), np.int8)},
         r"`named` must have 'out_proj' of floating numbers, or with its scales; got int8"),
        ({"A_log": np.ones(4, np.int32)}, r"`named` must have 'A_log' of floating numbers, or .*; got int32"),
        ({"out_proj.weight_scale": np.ones(())},
         r"`named` must have 'out_proj.weight' of float8 or int8, as it has 'out_proj.weight_scale'; got bfloat16"),
        ({"out_proj.weight": np.ones((D, V), np.int8), "out_proj.weight_scale": np.ones((7, 3))},
         r"`named` must have a scale for 'out_proj.weight', .*; got scales of shape \(7, 3\)"),
        ({"out_proj.weight": np.ones((D, V), np.int8), "out_proj.weight_scale": np.ones(3)},
         r"`named` must have a scale for 'out_proj.weight', .*; got scales of shape \(3,\)"),
    ],
)  # fmt: skip
def test_arrays_that_are_no_numbers(change, message):
    with pytest.raises(ValueError, match=message):
        layers.load_gated_delta_net(qwen3_5() | change, CONFIG)


def test_fused_gates():
    """Beside q, k and v in one matrix, b and a in one are b, then a."""
    named = qwen3_5()
    fused = {name: x for name, x in named.items() if name not in ("in_proj_a.weight", "in_proj_b.weight")}
    fused["in_proj_ba.weight"] = np.concatenate([named["in_proj_b.weight"], named["in_proj_a.weight"]])
    same(layers.load_gated_delta_net(fused, CONFIG), layers.load_gated_delta_net(named, CONFIG))
    whole = {name: x for name, x in fused.items() if "in_proj" not in name} | {"in_proj_qkvzba.weight": draw(8, D)}
    with pytest.raises(ValueError, match=r"must have 'q_proj' or .*; got neither, but .*'in_proj_qkvzba.weight'"):
        layers.load_gated_delta_net(whole, CONFIG)


KIMI = layers.KimiDeltaAttentionConfig(D, 2, 2, 16, 16, R=16, lower_bound=-5.0, full_rank_gate=True)


def kimi_k3() -> dict:
    shapes = dict(q_proj=(32, D), k_proj=(32, D), v_proj=(32, D), g_proj=(32, D), f_a_proj=(16, D), f_b_proj=(32, 16),
        b_proj=(2, D), o_proj=(D, 32), o_norm=(16,))  # fmt: skip
    named = {f"{name}.weight": draw(*shape) for name, shape in shapes.items()}
    named |= {f"{name}_conv1d.weight": draw(32, 1, 4) for name in "qkv"}
    return named | {"A_log": draw(2, dtype="float32"), "dt_bias": draw(32, dtype="float32")}


def test_kimi_k3():
    """The gate of its norm is one matrix, and zeros follow A_log; vLLM makes one matrix of q, k and v."""
    named = kimi_k3()
    weights = layers.load_kimi_delta_attention(named, KIMI)
    assert [x.shape for x in (*weights.f, *weights.z)] == [(D, 16), (16, 32), (D, 32)]
    made = jax.eval_shape(lambda: layers.init_kimi_delta_attention(jax.random.key(0), KIMI))
    assert jax.tree.map(jnp.shape, made) == jax.tree.map(jnp.shape, weights)
    specs = layers.shardings(KIMI, {"heads": "model"}).weights
    assert jax.tree.structure(specs) == jax.tree.structure(made)
    assert specs.z == (jax.sharding.PartitionSpec(None, "model"),)
    padded = named | {"A_log": np.pad(named["A_log"], (0, 6))}
    same(layers.load_kimi_delta_attention(padded, KIMI), weights)
    same(layers.load_kimi_delta_attention(named | {"A_log": named["A_log"].reshape(1, 1, 2, 1)}, KIMI), weights)
    with pytest.raises(ValueError, match=r"`named` must have 'A_log' with zeros after 2 entries; got others"):
        layers.load_kimi_delta_attention(named | {"A_log": np.ones(8, np.float32)}, KIMI)
    with pytest.raises(ValueError, match=r"`named` must have 'A_log' of shape \(2,\), as `config` asks for; got \(1,"):
        layers.load_kimi_delta_attention(named | {"A_log": np.ones(1, np.float32)}, KIMI)
    fused = {name: x for name, x in named.items() if name not in [f"{each}_proj.weight" for each in "qkv"]}
    fused["qkv_proj.weight"] = np.concatenate([named[f"{each}_proj.weight"] for each in "qkv"])
    same(layers.load_kimi_delta_attention(fused, KIMI), weights)
