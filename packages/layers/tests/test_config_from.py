"""The config of a layer out of the settings of a model, as its file has them, and as `to_dict()` gives them."""

import functools
import json
import math
from pathlib import Path

import pytest

from chunkwise.layers import (
    GatedDeltaNetConfig,
    KimiDeltaAttentionConfig,
    LightningAttentionConfig,
    Mamba2Config,
    MlstmLayerConfig,
    config_from,
)
from tests.hostile_settings import assert_sound
from tests.shown import Shown, layer_of

MODEL = dict(hidden_size=64, vocab_size=50, num_hidden_layers=4, hidden_act="silu", rms_norm_eps=1e-3, use_cache=True)
LINEAR = dict(
    linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=16, linear_value_head_dim=24,
    linear_conv_kernel_dim=3,
)  # fmt: skip
KIMI = dict(linear_num_heads=2, linear_head_dim=16, linear_conv_kernel_dim=4)
MIXER = dict(
    mamba_n_heads=4, mamba_d_head=32, mamba_n_groups=2, mamba_d_state=16, mamba_d_conv=4, mamba_expand=2,
    mamba_conv_bias=True, mamba_proj_bias=False, time_step_limit=[0.0, math.inf],
)  # fmt: skip
FALCON = dict(
    mamba_d_ssm=128, mamba_norm_before_gate=True, mamba_rms_norm=True, projectors_bias=True, ssm_in_multiplier=0.5,
    ssm_multipliers=[1, 2, 3, 4, 5],
)  # fmt: skip
delta = functools.partial(GatedDeltaNetConfig, 64, 2, 4, 16, 24, 3)
lightning = functools.partial(LightningAttentionConfig, layer=2)
turned = lambda *sizes, **more: lightning(*sizes, activation=None, scale=sizes[3] ** -0.5, qk_norm=True, **more)
angles = lambda channels, theta: tuple(theta ** (-c / channels) for c in range(0, channels, 2))
mixer = functools.partial(Mamba2Config, 64, 2, 4, 16, 32)
MODELS = {
    **dict.fromkeys(("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "lara_mini"), (LINEAR, delta(1e-3))),
    "qwen4_exp_text": (LINEAR | dict(output_gate_type="sigmoid"), delta(1e-3, activation="sigmoid")),
    "olmo_hybrid": (LINEAR | dict(linear_allow_neg_eigval=True), delta(1e-5, allow_neg_eigval=True)),
    "kimi_linear": (KIMI, KimiDeltaAttentionConfig(64, 2, 2, 16, 16, eps=1e-3, R=16)),
    "bailing_hybrid": (
        KIMI | dict(short_conv_kernel_size=4, kda_safe_gate=True, kda_lower_bound=-5.0),
        KimiDeltaAttentionConfig(64, 2, 2, 16, 16, eps=1e-3, lower_bound=-5.0),
    ),
    "glm5_next_text": (KIMI | dict(linear_lower_bound=None), KimiDeltaAttentionConfig(64, 2, 2, 16, 16, 4, 1e-3, R=16)),
    "mamba2": (
        dict(
            num_heads=4, head_dim=32, state_size=16, n_groups=2, expand=2, conv_kernel=4, use_bias=True,
            use_conv_bias=False, time_step_limit=(0.1, 2.0), time_step_min=0.5, layer_norm_epsilon=1e-2,
        ),
        mixer(eps=1e-2, conv_bias=False, dt_limit=(0.1, 2.0), in_bias=True, out_bias=True),
    ),
    "bamba": (MIXER, mixer(eps=1e-3)),
    "granitemoehybrid": (MIXER | dict(mamba_proj_bias=True), mixer(eps=1e-3, in_bias=True, out_bias=True)),
    "nemotron_h": (
        dict(
            mamba_num_heads=4, mamba_head_dim=24, ssm_state_size=16, n_groups=2, conv_kernel=4, use_bias=False,
            use_conv_bias=True, layer_norm_epsilon=1e-2, time_step_min=0.5, time_step_limit=(0.25, 1.0), expand=2,
            mamba_hidden_act="silu", mamba_proj_bias=True,
        ),
        Mamba2Config(64, 2, 4, 16, 24, eps=1e-2, dt_limit=(0.25, 1.0)),
    ),
    "zamba2": (
        dict(
            n_mamba_heads=4, mamba_headdim=32, mamba_d_state=16, mamba_ngroups=2, mamba_d_conv=4, mamba_expand=2,
            add_bias_linear=False, use_conv_bias=False, time_step_min=0.5, hidden_act="gelu",
        ),
        mixer(eps=1e-5),
    ),
    "falcon_h1": (
        MIXER | FALCON,
        mixer(eps=1e-3, norm="before", out_bias=True, in_multiplier=0.5, multipliers=(1.0, 2.0, 3.0, 4.0, 5.0)),
    ),
    "minimax": (dict(num_attention_heads=4, head_dim=None), lightning(64, 4, 4, 16, 16, layers=4)),
    "bailing_moe_linear": (
        dict(
            num_attention_heads=4, head_dim=16, layer_group_size=4, group_norm_size=2, linear_silu=False,
            rope_theta=100, partial_rotary_factor=0.25, use_qk_norm=True, use_bias=False, use_qkv_bias=False,
            rope_scaling=None,
        ),
        turned(64, 4, 4, 16, 16, eps=1e-3, layers=4, slope_factor=1 - 1 / 3 + 1e-5, groups=2, frequencies=(1.0, 0.1)),
    ),
    "minicpm_sala": (
        dict(
            lightning_nh=4, lightning_nkv=4, lightning_head_dim=4, lightning_scale="1/d", rope_theta=100.0,
            qk_norm=True, use_output_norm=True, use_output_gate=True, attn_use_output_gate=True,
            lightning_use_rope=True, mixer_types=["minicpm4", "lightning-attn", "lightning-attn"],
        ),
        LightningAttentionConfig(
            64, 4, 4, 4, 4, eps=1e-3, slope_factor=1.0, activation=None, scale=0.25, qk_norm=True,
            frequencies=(1.0, 0.1),
        ),
    ),
    "xlstm": (
        dict(num_heads=4, qk_dim_factor=0.5, v_dim_factor=2.0, norm_eps=1e-3, eps=1e-4, gate_soft_cap=3.0),
        MlstmLayerConfig(64, 4, 4, 8, 32, eps=1e-3, gate_soft_cap=3.0, divisor_eps=1e-4),
    ),
}  # fmt: skip


# Settings of a model that others have under another name.
RENAMED = {"rms_norm_eps": "layer_norm_epsilon", "hidden_act": "mamba_hidden_act"}


def settings(name, **change) -> dict:
    own = MODELS[name][0]
    shared = {key: value for key, value in MODEL.items() if RENAMED.get(key) not in own}
    return shared | dict(model_type=name) | own | change


# Names of settings that may change a layer.
UNKNOWN = """
    linear_gate_power linear_use_qk_norm mamba_rms_eps kda_gate_power ssm_skip conv_dilation time_step_power
    norm_before_conv group_norm_bias use_short_conv gdn_heads decay_per_channel delta_rank
""".split()  # noqa: SIM905


@pytest.mark.parametrize("name", MODELS)
def test_unknown_settings_are_refused(name):
    for setting in UNKNOWN:
        with pytest.raises(ValueError, match=rf"no settings that `config_from` does not know; got \['{setting}'\]"):
            config_from(settings(name, **{setting: 2}), layer=2)


def test_unknown_settings_of_the_table_of_a_layer_are_refused():
    table = dict(num_heads=2, head_dim=16, short_conv_kernel_size=4, gate_power=2)
    with pytest.raises(ValueError, match=r"does not know; got \['linear_attn_config.gate_power'\]"):
        config_from(settings("kimi_linear", linear_attn_config=table))


@pytest.mark.parametrize("name", MODELS)
def test_other_names_are_passed(name):
    others = dict(
        unsloth_version="2026.3.4", quantization_config=dict(quant_method="fp8", weight_block_size=[128, 128]),
        rope_scaling=None, moe_layer_freq=1, mamba_ssm_dtype="float32", mamba_chunk_size=256, attn_output_gate=True,
        linear_a_log_min=0.0, conv_initializer_range=None, gated_linear_unit=True, weight_decay=0.1, ema_decay=0.99,
        lr_decay_steps=10, linear_rope_scaling=2.0, rope_deltas=[1], conv_stem=True, mamba_cache_dtype="float32",
        exponential_decay_length_penalty=[5, 1.1], linear_gate_power=None,
    )  # fmt: skip
    assert config_from(settings(name, **others), layer=2) == MODELS[name][1]


@pytest.mark.parametrize("name", MODELS)
def test_null_is_the_default(name):
    """A setting that is null is as one that is missing, where null has no meaning of its own."""
    meaning = ("linear_lower_bound", "mamba_d_ssm", "mamba_norm_before_gate", "head_dim")
    meaning += ("linear_num_key_heads", "linear_key_head_dim", "gate_soft_cap")
    for setting in [each for each in {**MODEL, **MODELS[name][0]} if each not in meaning]:
        without = settings(name)
        without.pop(setting, None)
        try:
            expected = config_from(without, layer=2)
        except ValueError:
            continue
        assert config_from(settings(name, **{setting: None}), layer=2) == expected, setting


# The layers of the models in published.json.
LAYERS = {
    "Qwen3-Next-80B-A3B": GatedDeltaNetConfig(2048, 16, 32, 128, 128),
    "Qwen3-Next-80B-A3B-FP8": GatedDeltaNetConfig(2048, 16, 32, 128, 128),
    "Qwen3.5-27B": GatedDeltaNetConfig(5120, 16, 48, 128, 128),
    "Qwen3.8-27B": GatedDeltaNetConfig(5120, 16, 48, 128, 128),
    "Qwen3.5-27B, a fine-tune of its text": GatedDeltaNetConfig(5120, 16, 48, 128, 128),
    "Qwen3.6-35B-A3B-FP8": GatedDeltaNetConfig(2048, 16, 32, 128, 128),
    "Qwen4-Exp": GatedDeltaNetConfig(2560, 16, 48, 128, 128, activation="sigmoid"),
    "Olmo-Hybrid-7B": GatedDeltaNetConfig(3840, 30, 30, 96, 192, eps=1e-5, allow_neg_eigval=True),
    "Kimi-Linear-48B-A3B": KimiDeltaAttentionConfig(2304, 32, 32, 128, 128, R=128),
    "Kimi-K3": KimiDeltaAttentionConfig(7168, 96, 96, 128, 128, R=128, lower_bound=-5.0, full_rank_gate=True),
    "GLM-5.3-Flash": KimiDeltaAttentionConfig(4096, 64, 64, 128, 128, R=128, lower_bound=-5.0),
    "Ling-3.0-tiny": KimiDeltaAttentionConfig(1536, 16, 16, 128, 128, eps=1e-6, lower_bound=-5.0),
    "Ling-3.0-flash": KimiDeltaAttentionConfig(2560, 32, 32, 128, 128, eps=1e-6, lower_bound=-5.0),
    "Edge0-8B-A1B": KimiDeltaAttentionConfig(1536, 16, 16, 128, 128, eps=1e-6, lower_bound=-5.0),
    "Mamba-Codestral-7B": Mamba2Config(4096, 8, 128, 128, 64),
    "mamba2-780m": Mamba2Config(1536, 1, 48, 128, 64),
    "Bamba-9B": Mamba2Config(4096, 1, 128, 128, 64),
    "Granite-4.0-H-Tiny": Mamba2Config(1536, 1, 48, 128, 64),
    "Granite-4.0-H-350M, of 4 bits": Mamba2Config(768, 1, 48, 128, 32),
    "Nemotron-H-8B": Mamba2Config(4096, 8, 128, 128, 64),
    "Nemotron-3-Nano-30B-A3B": Mamba2Config(2688, 8, 64, 128, 64),
    "Nemotron-3.5-Lightning-30B-A3B": Mamba2Config(2688, 8, 64, 128, 64),
    "Zamba2-7B, at first": Mamba2Config(3584, 2, 112, 64, 64),
    "Falcon-H1-0.5B": Mamba2Config(
        1024, 1, 24, 128, 64, norm=None, in_multiplier=1.25,
        multipliers=(0.3535533905932738, 0.25, 0.3535533905932738, 0.5, 0.3535533905932738),
    ),
    "MiniMax-Text-01-hf": lightning(6144, 64, 64, 128, 128, layers=80),
    "MiniMax-Text-01": lightning(6144, 64, 64, 128, 128, layers=80),
    "Ring-mini-linear-2.0": turned(
        2048, 16, 16, 128, 128, eps=1e-6, layers=20, slope_factor=1 - 1 / 19 + 1e-5, groups=4,
        frequencies=angles(64, 1e6),
    ),
    "MiniCPM-SALA": turned(
        4096, 32, 32, 128, 128, eps=1e-6, layer=0, slope_factor=1.0, frequencies=angles(128, 1e4)
    ),
    "xLSTM-7B": MlstmLayerConfig(4096, 8, 8, 256, 512),
}  # fmt: skip
PUBLISHED = json.loads((Path(__file__).parent / "published.json").read_text())
SHOWS = dict(
    test_other_names_are_passed=lambda name: Shown(layer_of(MODELS[name][1]), "config", name.removesuffix("_text")),
    test_published_files=lambda name: Shown(
        layer_of(LAYERS[name]), "config", PUBLISHED[name]["model_type"].removesuffix("_text")
    ),
)


@pytest.mark.parametrize("name", sorted(PUBLISHED.keys() | LAYERS.keys()))
def test_published_files(name):
    # The third layer of the shortened file of Nemotron-3.5 is attention.
    layer = 0 if name.startswith("Nemotron-3.5") else 2
    assert config_from(PUBLISHED[name], layer=layer) == LAYERS[name]
    text = PUBLISHED[name].get("text_config")
    assert config_from(PUBLISHED[name] if text is None else text, layer=layer) == LAYERS[name]


def test_null_is_no_cap():
    assert config_from(settings("xlstm", gate_soft_cap=None)).gate_soft_cap is None
    assert config_from(dict(model_type="xlstm")).gate_soft_cap == 15.0


def test_slstm_is_refused_by_name():
    for name, value in dict(slstm_at=[1], slstm_block=dict(num_heads=4)).items():
        with pytest.raises(ValueError, match=r"`hf_config` must have no sLSTM blocks, .*; got"):
            config_from(settings("xlstm", **{name: value}))
    assert config_from(settings("xlstm", slstm_at=[])) == MODELS["xlstm"][1]
    with pytest.raises(ValueError, match=r"`hf_config.use_bias` must be one of \(False,\) for this layer; got True"):
        config_from(settings("xlstm", use_bias=True))
    with pytest.raises(ValueError, match=r"`hf_config.qk_dim_factor` must make a multiple of 4 channels; got 19"):
        config_from(settings("xlstm", qk_dim_factor=0.3))


def test_ling_2_has_another_layer():
    """Ling 2.6 has the type of model of Ling 3.0, and lightning attention."""
    found = dict(
        architectures=["BailingMoeV2_5ForCausalLM"], model_type="bailing_hybrid", hidden_size=4096, hidden_act="silu",
        num_attention_heads=32, head_dim=128, layer_group_size=8, linear_silu=False, rms_norm_eps=1e-6,
    )  # fmt: skip
    made = config_from(found, layer=0)
    assert (made.slope_factor, made.groups, made.activation) == (1 + 1 / 19 + 1e-5, 4, None)
    assert config_from(found | dict(linear_silu=True), layer=1).activation == "silu"
    assert config_from(found | dict(num_hidden_layers=15), layer=6).layers == 15
    with pytest.raises(ValueError, match=r"a setting that tells Ling 2\.x from Ling 3\.0"):
        config_from(dict(model_type="bailing_hybrid", hidden_size=4096), layer=0)
    for layer in (7, 8):
        with pytest.raises(ValueError, match="a layer with linear attention; got"):
            config_from(found | dict(num_hidden_layers=15), layer=layer)
    with pytest.raises(ValueError, match=r"`hf_config.group_norm_size` must be one of \(1,\) for this layer; got 4"):
        config_from(found | dict(short_conv_kernel_size=4, group_norm_size=4))
    with pytest.raises(ValueError, match=r"`hf_config.linear_silu` must be one of \(True,\) for this layer; got False"):
        config_from(found | dict(kda_safe_gate=True))
    third = found | dict(architectures=["BailingMoeV3ForCausalLM"], linear_silu=True)
    assert config_from(third) == KimiDeltaAttentionConfig(4096, 32, 32, 128, 128, eps=1e-6, lower_bound=-5.0)


def test_scaling_of_rotary_positions():
    """YaRN keeps fast frequencies, divides slow ones, and multiplies by a factor of its own, as in its paper."""
    made = lambda **table: config_from(settings("bailing_moe_linear", **table), layer=2)
    linear = made(rope_scaling=dict(type="linear", factor=4.0))
    assert (linear.frequencies, linear.rotary_scale) == ((0.25, 0.025), 1.0)
    table = dict(rope_theta=1e6, rope_type="yarn", factor=4.0, original_max_position_embeddings=32768)
    wide = dict(head_dim=128, partial_rotary_factor=0.5, rope_scaling=None)
    found, plain = (made(**wide, rope_parameters=table | more) for more in ({}, dict(rope_type="default")))
    ratio = [a / b for a, b in zip(found.frequencies, plain.frequencies, strict=True)]
    # Frequencies that turn 32 times over the length are kept; those that do not turn once become a quarter.
    turns = [32768 * x / (2 * math.pi) for x in plain.frequencies]
    low, high = (next(i for i, n in enumerate(turns) if n < most) for most in (32, 1))
    assert ratio[:low] == pytest.approx([1.0] * low)
    assert ratio[high:] == pytest.approx([0.25] * (len(ratio) - high))
    between = [1 - 0.75 * (i - low + 1) / (high - low + 1) for i in range(low, high)]
    assert ratio[low:high] == pytest.approx(between)
    assert found.rotary_scale == pytest.approx(0.1 * math.log(4) + 1)
    assert made(**wide, rope_parameters=table | dict(mscale=2.0, mscale_all_dim=2.0)).rotary_scale == 1.0
    more = made(**wide, rope_parameters=table | dict(mscale=2.0, mscale_all_dim=1.0)).rotary_scale
    assert more == pytest.approx((0.2 * math.log(4) + 1) / found.rotary_scale)
    assert made(**wide, rope_parameters=table | dict(attention_factor=3.0)).rotary_scale == 3.0


def test_laws_of_kimi():
    made = lambda **table: config_from(dict(model_type="kimi_linear", linear_attn_config=table))
    assert made(gate_lower_bound=-5.0).lower_bound == -5.0
    assert made(gate_lower_bound=None).lower_bound is None
    assert made(head_dim=64).R == 64
    assert made(no_kda_lora=True).R is None
    assert made(head_dim=64, use_full_rank_gate=True).full_rank_gate
    with pytest.raises(ValueError, match=r"`hf_config.linear_attn_config.safe_gate` must be one of \(False,\)"):
        made(safe_gate=True)
    with pytest.raises(ValueError, match=r"`hf_config.linear_num_heads` must be one of \(2,\) for this layer; got 3"):
        config_from(dict(model_type="kimi_linear", linear_num_heads=3, linear_attn_config=dict(num_heads=2)))
    ling = dict(model_type="bailing_hybrid", short_conv_kernel_size=4, kda_lower_bound=-3.0)
    assert config_from(ling).lower_bound == -3.0
    assert config_from(ling | dict(kda_safe_gate=False)).lower_bound is None


def test_laws_of_glm():
    """transformers takes a bound of -5 for a table without one, unless the table has no safe gate."""
    made = lambda **change: config_from(dict(model_type="glm5_next_text") | change).lower_bound
    assert made() == -5.0
    assert made(linear_lower_bound=None) is None
    assert made(linear_attn_config=dict(gate_lower_bound=-3.0)) == -3.0
    assert made(linear_attn_config=dict(gate_lower_bound=None)) == -5.0
    assert made(linear_attn_config=dict(gate_lower_bound=None, safe_gate=False)) is None


def test_sizes_that_follow_from_others():
    minimal = dict(model_type="olmo_hybrid", hidden_size=64, num_attention_heads=2)
    assert config_from(minimal) == GatedDeltaNetConfig(64, 2, 2, 24, 48, eps=1e-5, allow_neg_eigval=True)
    for size in ("auto", None):
        assert config_from(settings("bamba", mamba_d_head=size)) == MODELS["bamba"][1]
        assert config_from(settings("falcon_h1", mamba_d_head=size)) == MODELS["falcon_h1"][1]


def test_the_config_of_a_text():
    assert config_from(dict(model_type="qwen3_5", text_config=settings("qwen3_5_text"))) == MODELS["qwen3_5_text"][1]


def test_infinity_as_a_file_has_it():
    limit = [0.0, {"__float__": "Infinity"}]
    assert config_from(settings("bamba", time_step_limit=limit)) == MODELS["bamba"][1]


def test_settings_of_falcon_h1():
    made = lambda **change: config_from(settings("falcon_h1", **change))
    assert made(mamba_norm_before_gate=False).norm == made(mamba_norm_before_gate=None).norm == "after"
    assert made(mamba_rms_norm=False).norm is None
    assert made(mamba_d_ssm=None) == made()


# What a model has set, and how the error goes on after the name of the setting, if it does not begin with it.
REFUSED = [
    ("qwen3_next", dict(hidden_act="gelu"), r"must be one of \('silu', 'swish'\).*'gelu'"),
    ("nemotron_h", dict(mamba_hidden_act="relu"), "must be one of .*; got 'relu'"),
    ("qwen4_exp_text", dict(output_gate_type="relu"), "`activation` must be one of .*; got 'relu'"),
    ("bailing_hybrid", dict(short_conv_kernel_size=3), r"must be one of \(4,\)"),
    ("bailing_hybrid", dict(num_kv_heads_for_linear_attn=1), "must be one of"),
    ("bailing_hybrid", dict(use_kda_lora=True), r"must be one of \(False,\)"),
    ("kimi_linear", dict(linear_allow_neg_eigval=True), "must be one of"),
    ("mamba2", dict(rms_norm=False), r"must be one of \(True,\) for this layer; got False"),
    ("olmo_hybrid", dict(linear_use_gate=False), r"must be one of \(True,\)"),
    ("zamba2", dict(time_step_limit=[1.0, 0.5]), "must be two rising numbers"),
    ("bamba", dict(mamba_expand=3), "must make 128 channels, .*; got 192"),
    ("falcon_h1", dict(mamba_d_ssm=64), r"must be one of \(128,\) .*; got 64"),
    ("qwen3_next", dict(model_type="llama"), r"must be one of \['bailing_hybrid', .*'zamba2'\]; got 'llama'"),
    ("falcon_h1", dict(mamba_rms_norm="false"), "must be true or false; got 'false'"),
    ("kimi_linear", dict(linear_attn_config=dict(no_kda_lora="x")), "`hf_config.linear_attn_config.no_kda_lora` must"),
    ("kimi_linear", dict(linear_attn_config=[1]), "must be a table of settings; got"),
    ("qwen3_next", dict(text_config="x"), "must be a table of settings; got 'x'"),
    ("qwen3_next", dict(rms_norm_eps=math.inf), "must be a finite number; got inf"),
    ("qwen3_next", dict(rms_norm_eps=True), "must be a finite number; got True"),
    ("qwen3_next", dict(hidden_size="64"), "must be a whole number above 0; got '64'"),
    ("qwen3_next", dict(linear_num_key_heads=1.5), "must be a whole number above 0; got"),
    ("qwen3_next", dict(model_type=["qwen3_next"]), r"must be one of .*; got \['qwen3_next'\]"),
    ("falcon_h1", dict(ssm_multipliers=[math.nan] * 5), "must be a list of finite numb"),
    ("mamba2", dict(time_step_limit=5), "must be two rising numbers from 0 on; got 5"),
    ("minimax", dict(num_attention_heads=0), "must be a whole number above 0; got 0"),
    ("bamba", dict(layer_types=5), "must be a list; got 5"),
    ("bailing_moe_linear", dict(use_qkv_bias=True), r"must be one of \(False,\)"),
    ("bailing_moe_linear", dict(num_attention_heads=6), "must be a power of 2 for this layer; got 6"),
    ("bailing_moe_linear", dict(rotary_dim=8), r"must be one of \(4,\) for this layer; got 8"),
    ("bailing_moe_linear", dict(rope_scaling=dict(type="dynamic")), "`hf_config.rope_type` must be one of .*'dynamic'"),
    ("bailing_moe_linear", dict(rope_scaling=dict(type="linear")), "`hf_config.rope_scaling.factor` must be at least"),
    ("bailing_moe_linear", dict(partial_rotary_factor=2.0), "must make an even number of 16 channels; got 32"),
    ("minicpm_sala", dict(lightning_nkv=2), r"must be one of \(4,\) for this layer; got 2"),
]


@pytest.mark.parametrize(("name", "change", "message"), REFUSED)
def test_settings_that_no_layer_can_do(name, change, message):
    """Settings of a wrong value or type are named."""
    (setting,) = change
    with pytest.raises(ValueError, match=message if message.startswith("`") else f"`hf_config.{setting}` {message}"):
        config_from(settings(name, **change), layer=2)


def test_wrong_arguments():
    with pytest.raises(ValueError, match="`layer` must be the number of the layer, which its decay depends on; got"):
        config_from(settings("minimax"))
    with pytest.raises(ValueError, match="`hf_config` must be a config of transformers; got str"):
        config_from("qwen3_next")


@pytest.mark.parametrize(
    ("settings", "layer", "message"),
    [
        (dict(model_type="granitemoehybrid", layer_types=["attention"]), None, "must have a layer of linear attention"),
        (dict(model_type="qwen3_next"), 3, "`layer` must be the number of a layer with linear attention; got 3"),
        (dict(model_type="qwen3_next", full_attention_interval=3), 2, "a layer with linear attention; got 2"),
        (dict(model_type="bailing_moe_v3"), 5, "a layer with linear attention; got 5"),
        (dict(model_type="bamba", attn_layer_indices=[9, 18, 27]), 9, "a layer with linear attention; got 9"),
        (dict(model_type="kimi_linear", linear_attn_config=dict(kda_layers=[1, 3])), 1, "linear attention; got 1"),
        (dict(model_type="kimi_linear"), 4, "a layer with linear attention; got 4"),
        (dict(model_type="nemotron_h", hybrid_override_pattern="M-*"), 1, "a layer with linear attention; got 1"),
        (dict(model_type="nemotron_h", layers_block_type=["mamba", "moe"]), 1, "a layer with linear attention; got 1"),
        (PUBLISHED["MiniMax-Text-01"], 7, "a layer with linear attention; got 7"),
        (PUBLISHED["MiniMax-Text-01-hf"], 7, "a layer with linear attention; got 7"),
        (PUBLISHED["MiniMax-Text-01"], 80, "`layer` must be below 80, the layers of the model; got 80"),
        (dict(model_type="mamba2"), -1, "`layer` must be a whole number from 0 on; got -1"),
        (dict(model_type="mamba2"), 1.5, "`layer` must be a whole number from 0 on; got 1.5"),
    ],
)  # fmt: skip
def test_layers_without_linear_attention(settings, layer, message):
    with pytest.raises(ValueError, match=message):
        config_from(settings, layer)


def test_limits_of_time_steps():
    """The limit is in `time_step_limit`; the other settings of time steps are for a new model."""
    made = lambda **change: config_from(dict(model_type="nemotron_h", time_step_min=0.001) | change).dt_limit
    assert made() == made(time_step_limit=None) == made(time_step_limit=[0.0, 1e308]) == (0.0, math.inf)
    assert made(time_step_limit=[0.0, "Infinity"]) == (0.0, math.inf)
    assert made(mamba_dt_limit=[0.1, 2]) == (0.1, 2.0)
    zamba = dict(model_type="zamba2", mamba_headdim=64, time_step_min=0.001)
    assert config_from(zamba).dt_limit == (0.0, math.inf)
    assert config_from(zamba | dict(time_step_limit=[0.1, 2])).dt_limit == (0.1, 2.0)


def test_groups_of_nemotron():
    for groups in (dict(n_groups=2), dict(mamba_num_groups=2), dict(n_groups=2, mamba_num_groups=2)):
        assert config_from(dict(model_type="nemotron_h") | groups).H == 2
    with pytest.raises(ValueError, match=r"`hf_config.mamba_num_groups` must be one of \(2,\) for this layer; got 4"):
        config_from(dict(model_type="nemotron_h", n_groups=2, mamba_num_groups=4))


TABLES = """
    text_config llm_config linear_attn_config layer_types model_type time_step_limit ssm_multipliers
""".split()  # noqa: SIM905


@pytest.mark.parametrize("name", MODELS)
def test_hostile_settings(name):
    """Whatever a file has, the result is a config of right types or a ValueError."""
    own = settings(name)
    assert_sound(own, MODELS[name][1], TABLES)
    for layer in (1.5, True, "2", math.nan, 10**400, -1, [2]):
        with pytest.raises(ValueError, match="`layer` must be"):
            config_from(own, layer)
