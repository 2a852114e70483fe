"""Layers as transformers runs them, in small models of random weights, against those of chunkwise.layers."""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import pytest

from chunkwise.layers import (
    GatedDeltaNetConfig,
    KimiDeltaAttentionConfig,
    LayerConfig,
    LightningAttentionConfig,
    Mamba2Config,
    config_from,
    gated_delta_net,
    kimi_delta_attention,
    lightning_attention,
    load_gated_delta_net,
    load_kimi_delta_attention,
    load_lightning_attention,
    load_mamba2_mixer,
    mamba2_mixer,
)
from recording import ATTENTION, build, check_calls, check_token_by_token, conv_and_state, randomise, record

# The full attention of Kimi-Linear and Ling 3.0, and a norm whose epsilon shows in the result.
LATENT = ATTENTION | dict(
    num_key_value_heads=2, mlp_layer_types=["dense", "dense"], kv_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=8,
    v_head_dim=8, rms_norm_eps=1e-3,
)  # fmt: skip
QWEN = ATTENTION | dict(
    num_key_value_heads=1, head_dim=32, moe_intermediate_size=32, shared_expert_intermediate_size=32,
    linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=16, linear_value_head_dim=24,
)  # fmt: skip
DELTA_NET, KIMI = (gated_delta_net, load_gated_delta_net), (kimi_delta_attention, load_kimi_delta_attention)

# What models with a mixer share; Falcon-H1 has it scaled.
MIXER = dict(
    num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, intermediate_size=64, mamba_n_heads=4,
    mamba_d_head=32, mamba_d_state=16, mamba_n_groups=2, mamba_chunk_size=32, rms_norm_eps=1e-3,
)  # fmt: skip
FALCON = ("falcon_h1", "FalconH1Config", "FalconH1Model")
SCALED = MIXER | dict(mamba_d_ssm=128, ssm_in_multiplier=0.5, ssm_multipliers=[0.5, 1.5, 0.7, 1.2, 0.8])
MULTIPLIERS = dict(eps=1e-3, in_multiplier=0.5, multipliers=(0.5, 1.5, 0.7, 1.2, 0.8))


class Model(NamedTuple):
    """A model of transformers, and our layer.

    Attributes:
      names: of its module, its configuration and the model without a head.
      settings: of the configuration.
      attribute: of its first block, the layer.
      ones: the layer's parameters that are ones or zeros at first.
      functions: our layer, and what makes its weights.
      config: its sizes.
      recorded: how the layer is recorded.
    """

    names: tuple[str, str, str]
    settings: dict
    attribute: str
    ones: tuple[str, ...]
    functions: tuple[Callable, Callable]
    config: LayerConfig
    recorded: dict


MODELS = {
    "qwen3_next": Model(
        ("qwen3_next", "Qwen3NextConfig", "Qwen3NextModel"), QWEN | dict(num_experts=2, num_experts_per_tok=1),
        "linear_attn", ("dt_bias", "norm.weight"), DELTA_NET, GatedDeltaNetConfig(64, 2, 4, 16, 24), dict(),
    ),
    "qwen3_5": Model(
        ("qwen3_5", "Qwen3_5TextConfig", "Qwen3_5TextModel"), QWEN,
        "linear_attn", ("dt_bias", "norm.weight"), DELTA_NET, GatedDeltaNetConfig(64, 2, 4, 16, 24), dict(),
    ),
    "olmo_hybrid": Model(
        ("olmo_hybrid", "OlmoHybridConfig", "OlmoHybridModel"),
        ATTENTION | dict(num_key_value_heads=2, linear_key_head_dim=96, linear_value_head_dim=192),
        "linear_attn", ("o_norm.weight",), DELTA_NET,
        GatedDeltaNetConfig(64, 2, 2, 96, 192, eps=1e-5, allow_neg_eigval=True), dict(),
    ),
    "kimi_linear": Model(
        ("kimi_linear", "KimiLinearConfig", "KimiLinearModel"), LATENT | dict(linear_num_heads=2, linear_head_dim=16),
        "self_attn", ("o_norm.weight",), KIMI, KimiDeltaAttentionConfig(64, 2, 2, 16, 16, eps=1e-3, R=16), dict(),
    ),
    "ling": Model(
        ("bailing_hybrid", "BailingHybridConfig", "BailingHybridModel"), LATENT | dict(head_dim=16),
        "self_attn", ("o_norm.weight",), KIMI,
        KimiDeltaAttentionConfig(64, 2, 2, 16, 16, eps=1e-3, lower_bound=-5.0), dict(),
    ),
    "mamba2": Model(
        ("mamba2", "Mamba2Config", "Mamba2Model"),
        dict(
            num_hidden_layers=1, num_heads=4, head_dim=32, state_size=16, n_groups=2, chunk_size=32,
            layer_norm_epsilon=1e-3,
        ),
        "mixer", ("D", "norm.weight", "conv1d.bias"), (mamba2_mixer, load_mamba2_mixer),
        Mamba2Config(64, 2, 4, 16, 32, eps=1e-3),
        dict(kept=functools.partial(conv_and_state, transposed=True)),
    ),
    "minimax": Model(
        ("minimax", "MiniMaxConfig", "MiniMaxModel"),
        dict(
            num_hidden_layers=3, layer_types=["linear_attention", "linear_attention", "full_attention"],
            num_attention_heads=4, num_key_value_heads=2, head_dim=16, block_size=32, intermediate_size=64,
            num_local_experts=2,
        ),
        "self_attn", ("norm.weight",), (lightning_attention, load_lightning_attention),
        LightningAttentionConfig(64, 4, 4, 16, 16, layer=0, layers=3),
        dict(kept=lambda past: (None, past.get_linear_cache(0))),
    ),
}  # fmt: skip

MIXED = (mamba2_mixer, load_mamba2_mixer)
ONES = ("D", "norm.weight", "conv1d.bias", "dt_bias")
TRANSPOSED = dict(kept=functools.partial(conv_and_state, transposed=True))
VARIANTS = {
    "granitemoehybrid": Model(
        ("granitemoehybrid", "GraniteMoeHybridConfig", "GraniteMoeHybridModel"),
        MIXER | dict(
            layer_types=["linear_attention", "full_attention"], num_local_experts=2, num_experts_per_tok=1,
            shared_intermediate_size=32,
        ),
        "mamba", ONES, MIXED, Mamba2Config(64, 2, 4, 16, 32, eps=1e-3), TRANSPOSED,
    ),
    "nemotron_h": Model(
        ("nemotron_h", "NemotronHConfig", "NemotronHModel"),
        dict(
            layers_block_type=["linear_attention", "full_attention"], num_attention_heads=2, num_key_value_heads=1,
            head_dim=32, intermediate_size=64, mamba_num_heads=4, mamba_head_dim=24, ssm_state_size=16, n_groups=2,
            chunk_size=32, layer_norm_epsilon=1e-3, use_bias=True,
        ),
        "mixer", (*ONES, "in_proj.bias", "out_proj.bias"), MIXED,
        Mamba2Config(
            64, 2, 4, 16, 24, eps=1e-3, dt_limit=(1e-3, float("inf")), in_bias=True, out_bias=True
        ),
        TRANSPOSED,
    ),
    "zamba2": Model(
        ("zamba2", "Zamba2Config", "Zamba2Model"),
        dict(
            num_hidden_layers=2, layers_block_type=["linear_attention", "hybrid"], n_mamba_heads=4, mamba_d_state=16,
            mamba_ngroups=2, num_attention_heads=2, num_key_value_heads=2, intermediate_size=64, chunk_size=32,
        ),
        "mamba", ONES, MIXED, Mamba2Config(64, 2, 4, 16, 32, dt_limit=(1e-3, float("inf"))), TRANSPOSED,
    ),
    "bamba": Model(
        ("bamba", "BambaConfig", "BambaModel"), MIXER | dict(attn_layer_indices=[1], mamba_proj_bias=True), "mamba",
        (*ONES, "in_proj.bias", "out_proj.bias"), MIXED,
        Mamba2Config(64, 2, 4, 16, 32, eps=1e-3, in_bias=True, out_bias=True), TRANSPOSED,
    ),
    "falcon_h1, norm before the gate": Model(
        FALCON, SCALED | dict(mamba_rms_norm=True, mamba_norm_before_gate=True), "mamba", ONES, MIXED,
        Mamba2Config(64, 2, 4, 16, 32, norm="before", **MULTIPLIERS), TRANSPOSED,
    ),
    "falcon_h1, norm after the gate": Model(
        FALCON, SCALED | dict(mamba_rms_norm=True, mamba_norm_before_gate=False, mamba_proj_bias=True), "mamba",
        (*ONES, "in_proj.bias"), MIXED, Mamba2Config(64, 2, 4, 16, 32, in_bias=True, **MULTIPLIERS), TRANSPOSED,
    ),
    "falcon_h1, no norm": Model(
        FALCON, SCALED | dict(mamba_rms_norm=False, projectors_bias=True), "mamba",
        ("D", "conv1d.bias", "dt_bias", "out_proj.bias"), MIXED,
        Mamba2Config(64, 2, 4, 16, 32, norm=None, out_bias=True, **MULTIPLIERS), TRANSPOSED,
    ),
}  # fmt: skip


def recorded(ours: Model):
    """Return what the layer of a model reads and writes while it runs."""
    model = build(*ours.names, **ours.settings)
    layer = getattr(model.layers[0], ours.attribute)
    assert config_from(model.config, layer=0) == ours.config
    randomise(*(layer.get_parameter(name) for name in ours.ones))
    return record(model, layer, ours.functions[1], ours.config, **ours.recorded)


@pytest.fixture(scope="module", params=MODELS)
def case(request):
    """The name of a model, and what its layer reads and writes while it runs."""
    return request.param, recorded(MODELS[request.param])


@functools.cache
def compiled(name, implementation):
    """Our layer of a model, compiled once for all of its tests."""
    ours = (MODELS | VARIANTS)[name]
    layer = functools.partial(ours.functions[0], config=ours.config, output_cache=True, implementation=implementation)
    return jax.jit(lambda x, weights, cache: layer(x, weights, cache=cache))


implementations = pytest.mark.parametrize("implementation", ["xla", "staged", "fused"])
THOROUGH = dict.fromkeys(
    ["test_prefill_then_decode", "test_decode_from_the_first_token"], lambda implementation: implementation == "staged"
) | {"test_models_that_differ_by_settings": lambda name: name in ("granitemoehybrid", "bamba", "zamba2")}


@implementations
def test_prefill_then_decode(case, implementation):
    name, recording = case
    # Nothing came before: zeros, so that one program does both prefills.
    check_calls(compiled(name, implementation), recording, recording.nothing_before())


@implementations
def test_decode_from_the_first_token(case, implementation):
    name, recording = case
    check_token_by_token(compiled(name, implementation), recording, recording.nothing_before())


@pytest.mark.interpreted
@pytest.mark.parametrize("name", VARIANTS)
def test_models_that_differ_by_settings(name):
    recording = recorded(VARIANTS[name])
    check_calls(compiled(name, "xla"), recording, recording.nothing_before())
