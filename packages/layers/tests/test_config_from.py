"""The config of a layer out of the settings of a model of transformers, as its `to_dict()` gives them."""

import math

import pytest

from chunkwise.layers import (
    GatedDeltaNetConfig,
    KimiDeltaAttentionConfig,
    LightningAttentionConfig,
    Mamba2Config,
    config_from,
)

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
MODELS = {
    "qwen3_next": (LINEAR, GatedDeltaNetConfig(64, 2, 4, 16, 24, W=3, eps=1e-3)),
    "qwen3_5_text": (LINEAR, GatedDeltaNetConfig(64, 2, 4, 16, 24, W=3, eps=1e-3)),
    "qwen3_5_moe_text": (LINEAR, GatedDeltaNetConfig(64, 2, 4, 16, 24, W=3, eps=1e-3)),
    "lara_mini": (LINEAR, GatedDeltaNetConfig(64, 2, 4, 16, 24, W=3, eps=1e-3)),
    "qwen4_exp_text": (
        LINEAR | dict(output_gate_type="sigmoid"),
        GatedDeltaNetConfig(64, 2, 4, 16, 24, W=3, eps=1e-3, activation="sigmoid"),
    ),
    "olmo_hybrid": (
        LINEAR | dict(linear_allow_neg_eigval=True),
        GatedDeltaNetConfig(64, 2, 4, 16, 24, W=3, eps=1e-5, allow_neg_eigval=True),
    ),
    "kimi_linear": (KIMI, KimiDeltaAttentionConfig(64, 2, 2, 16, 16, eps=1e-3, R=16)),
    "bailing_hybrid": (
        KIMI | dict(short_conv_kernel_size=4, kda_safe_gate=True, kda_lower_bound=-5.0),
        KimiDeltaAttentionConfig(64, 2, 2, 16, 16, eps=1e-3, lower_bound=-5.0),
    ),
    "glm5_next_text": (
        KIMI | dict(linear_lower_bound=None), KimiDeltaAttentionConfig(64, 2, 2, 16, 16, eps=1e-3, R=16),
    ),
    "mamba2": (
        dict(
            num_heads=4, head_dim=32, state_size=16, n_groups=2, expand=2, conv_kernel=4, use_bias=True,
            use_conv_bias=False, time_step_limit=(0.1, 2.0), time_step_min=0.5, layer_norm_epsilon=1e-2,
        ),
        Mamba2Config(
            64, 2, 4, 16, 32, eps=1e-2, conv_bias=False, dt_limit=(0.1, 2.0), in_bias=True, out_bias=True
        ),
    ),
    "bamba": (MIXER, Mamba2Config(64, 2, 4, 16, 32, eps=1e-3)),
    "granitemoehybrid": (
        MIXER | dict(mamba_proj_bias=True), Mamba2Config(64, 2, 4, 16, 32, eps=1e-3, in_bias=True, out_bias=True),
    ),
    "nemotron_h": (
        dict(
            mamba_num_heads=4, mamba_head_dim=24, ssm_state_size=16, n_groups=2, conv_kernel=4, use_bias=False,
            use_conv_bias=True, layer_norm_epsilon=1e-2, time_step_min=0.5, time_step_limit=(0.0, 1.0), expand=2,
            mamba_hidden_act="silu", mamba_proj_bias=True,
        ),
        Mamba2Config(64, 2, 4, 16, 24, eps=1e-2, dt_limit=(0.5, math.inf)),
    ),
    "zamba2": (
        dict(
            n_mamba_heads=4, mamba_headdim=32, mamba_d_state=16, mamba_ngroups=2, mamba_d_conv=4, mamba_expand=2,
            add_bias_linear=False, use_conv_bias=False, time_step_min=0.5, hidden_act="gelu",
        ),
        Mamba2Config(64, 2, 4, 16, 32, eps=1e-5, dt_limit=(0.5, math.inf)),
    ),
    "falcon_h1": (
        MIXER | FALCON,
        Mamba2Config(
            64, 2, 4, 16, 32, eps=1e-3, norm="before", out_bias=True, in_multiplier=0.5,
            multipliers=(1.0, 2.0, 3.0, 4.0, 5.0),
        ),
    ),
    "minimax": (
        dict(num_attention_heads=4, head_dim=None), LightningAttentionConfig(64, 4, 4, 16, 16, layer=2, layers=4),
    ),
}  # fmt: skip


# Settings of a model that others have under another name.
RENAMED = {"rms_norm_eps": "layer_norm_epsilon", "hidden_act": "mamba_hidden_act"}


def settings(name, **change) -> dict:
    own = MODELS[name][0]
    shared = {key: value for key, value in MODEL.items() if RENAMED.get(key) not in own}
    return shared | dict(model_type=name) | own | change


@pytest.mark.parametrize("name", MODELS)
def test_config(name):
    assert config_from(settings(name), layer=2) == MODELS[name][1]


@pytest.mark.parametrize("name", MODELS)
def test_unknown_settings_are_refused(name):
    with pytest.raises(ValueError, match=r"no settings that `config_from` does not know; got \['linear_gate_power'\]"):
        config_from(settings(name, linear_gate_power=2), layer=2)


def test_the_config_of_a_text():
    assert config_from(dict(model_type="qwen3_5", text_config=settings("qwen3_5_text"))) == MODELS["qwen3_5_text"][1]


def test_infinity_as_a_file_has_it():
    limit = [0.0, {"__float__": "Infinity"}]
    assert config_from(settings("bamba", time_step_limit=limit)) == MODELS["bamba"][1]


def test_settings_of_falcon_h1():
    made = lambda **change: config_from(settings("falcon_h1", **change))
    assert made(mamba_norm_before_gate=False).norm == "after"
    assert made(mamba_rms_norm=False).norm is None
    assert made(mamba_d_ssm=None) == made()


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("qwen3_next", dict(hidden_act="gelu"), r"`hf_config.hidden_act` must be one of \('silu', 'swish'\).*'gelu'"),
        ("nemotron_h", dict(mamba_hidden_act="relu"), r"`hf_config.mamba_hidden_act` must be one of .*; got 'relu'"),
        ("qwen4_exp_text", dict(output_gate_type="relu"), r"`activation` must be one of .*; got 'relu'"),
        ("bailing_hybrid", dict(short_conv_kernel_size=3), r"`hf_config.short_conv_kernel_size` must be one of \(4,\)"),
        ("bamba", dict(mamba_expand=3), "`hf_config.mamba_expand` must make 128 channels, .*; got 192"),
        ("falcon_h1", dict(mamba_d_ssm=64), r"`hf_config.mamba_d_ssm` must be one of \(128,\) .*; got 64"),
        ("llama", {}, r"`hf_config.model_type` must be one of \['bailing_hybrid', .*'zamba2'\]; got 'llama'"),
    ],
)
def test_settings_that_no_layer_can_do(name, change, message):
    with pytest.raises(ValueError, match=message):
        config_from(settings(name, **change) if name in MODELS else dict(model_type=name))


def test_wrong_arguments():
    with pytest.raises(ValueError, match="`layer` must be the number of the layer, which its decay depends on; got"):
        config_from(settings("minimax"))
    with pytest.raises(ValueError, match="`hf_config` must be a config of transformers; got str"):
        config_from("qwen3_next")
    short = settings("qwen3_next")
    del short["linear_key_head_dim"]
    with pytest.raises(ValueError, match="`hf_config` must have `linear_key_head_dim`; got none"):
        config_from(short)
