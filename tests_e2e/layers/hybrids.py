"""The models of transformers whose linear attention a layer serves, each small and with random weights."""

import functools
from collections.abc import Callable
from typing import NamedTuple

from chunkwise.layers import (
    GatedDeltaNetConfig,
    KimiDeltaAttentionConfig,
    LayerConfig,
    LightningAttentionConfig,
    Mamba2Config,
    MlstmLayerConfig,
    gated_delta_net,
    kimi_delta_attention,
    lightning_attention,
    load_gated_delta_net,
    load_kimi_delta_attention,
    load_lightning_attention,
    load_mamba2_mixer,
    load_mlstm_layer,
    mamba2_mixer,
    mlstm_layer,
)
from chunkwise.pipeline import MlstmState
from tests_e2e.layers.recording import ATTENTION, build, conv_and_state, randomise


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

    def build(self, **change):
        """Return the model, with changed settings, and the layer of its first block."""
        if self.settings.get("weight_mode") == "fused":
            mend_first_weights()
        model = build(*self.names, **self.settings | change)
        layer = getattr((model.blocks if self.names[0] == "xlstm" else model.layers)[0], self.attribute)
        if self.names[0] in ("nemotron_h", "zamba2"):
            # transformers takes `time_step_min` for the least step in a prefill, which the trained models do not have.
            layer.time_step_limit = tuple(getattr(model.config, "time_step_limit", None) or (0.0, INFINITE))
        randomise(*(x for name, x in layer.named_parameters() if name in self.ones))
        # Gates of a few nats: where input gates are strong, the divisor of xLSTM amplifies the rounding of both.
        for name, weight in layer.named_parameters():
            if name in SMALL_ONES:
                weight.data *= 0.05
        return model, layer


def mend_first_weights() -> None:
    """Let transformers make a model of xLSTM with fused matrices: its rule for their first biases adds two sizes."""
    from transformers.modeling_utils import PreTrainedModel
    from transformers.models.xlstm import modeling_xlstm

    modeling_xlstm.xLSTMPreTrainedModel._init_weights = PreTrainedModel._init_weights


# The weights of the gates of xLSTM, which are zeros at first.
SMALL_ONES = tuple(f"{name}_preact.weight" for name in ("igate", "fgate", "ogate", "ifgate"))
DELTA_NET, KIMI = (gated_delta_net, load_gated_delta_net), (kimi_delta_attention, load_kimi_delta_attention)
MIXED = (mamba2_mixer, load_mamba2_mixer)
INFINITE = float("inf")
# The full attention of Kimi-Linear and Ling 3.0, and a norm whose epsilon shows in the result.
LATENT = ATTENTION | dict(
    num_key_value_heads=2, mlp_layer_types=["dense", "dense"], kv_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=8,
    v_head_dim=8, rms_norm_eps=1e-3,
)  # fmt: skip
SIZES = dict(linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=16, linear_value_head_dim=24)
EXPERTS = dict(num_experts=2, num_experts_per_tok=1, moe_intermediate_size=32, shared_expert_intermediate_size=32)
QWEN = ATTENTION | SIZES | dict(num_key_value_heads=1, head_dim=32, rms_norm_eps=1e-3)
DELTA, KIMIS = GatedDeltaNetConfig(64, 2, 4, 16, 24, eps=1e-3), dict(linear_num_heads=2, linear_head_dim=16)
INDEXED = dict(layer_types=["linear_attention", "indexed_attention"])
# What models with a mixer share; Falcon-H1 has it scaled.
MIXER = dict(
    num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, intermediate_size=64, mamba_n_heads=4,
    mamba_d_head=32, mamba_d_state=16, mamba_n_groups=2, mamba_chunk_size=32, rms_norm_eps=1e-3,
)  # fmt: skip
ONES = ("D", "norm.weight", "conv1d.bias", "dt_bias", "in_proj.bias", "out_proj.bias")
TRANSPOSED = dict(kept=functools.partial(conv_and_state, transposed=True))
GATED = ("dt_bias", "norm.weight")
FALCON = ("falcon_h1", "FalconH1Config", "FalconH1Model")
SCALED = MIXER | dict(mamba_d_ssm=128, ssm_in_multiplier=0.5, ssm_multipliers=[0.5, 1.5, 0.7, 1.2, 0.8])
MULTIPLIERS = dict(eps=1e-3, in_multiplier=0.5, multipliers=(0.5, 1.5, 0.7, 1.2, 0.8))


def falcon(settings: dict, **config) -> Model:
    """Return Falcon-H1 with some of its settings."""
    made = Mamba2Config(64, 2, 4, 16, 32, **MULTIPLIERS | config)
    return Model(FALCON, SCALED | settings, "mamba", ONES, MIXED, made, TRANSPOSED)


def qwen4(gate: str | None, activation: str) -> Model:
    """Return Qwen4-Exp with a gate of its norm."""
    settings = QWEN | EXPERTS | INDEXED | dict(
        output_gate_type=gate, hc_lowrank=8, indexer_n_heads=2, indexer_kv_heads=1, indexer_head_dim=32,
        indexer_budget=64, indexer_compress_ratio=4,
    )  # fmt: skip
    made = GatedDeltaNetConfig(64, 2, 4, 16, 24, eps=1e-3, activation=activation)
    names = ("qwen4_exp", "Qwen4ExpTextConfig", "Qwen4ExpTextModel")
    return Model(names, settings, "linear_attn", GATED, DELTA_NET, made, dict())


def glm5(lower_bound: float | None) -> Model:
    """Return GLM-5-next with a law of its decay."""
    settings = LATENT | KIMIS | INDEXED | dict(
        q_lora_rank=16, qk_rope_head_dim=0, linear_lower_bound=lower_bound, index_topk=32, index_head_dim=16,
        index_n_heads=2,
    )  # fmt: skip
    made = KimiDeltaAttentionConfig(64, 2, 2, 16, 16, eps=1e-3, R=16, lower_bound=lower_bound)
    names = ("glm5_next", "Glm5NextTextConfig", "Glm5NextTextModel")
    return Model(names, settings, "self_attn", ("o_norm.weight", "forget_gate.dt_bias"), KIMI, made, dict())


def xlstm(weight_mode: str) -> Model:
    """Return xLSTM with its matrices under names of their own or fused."""
    settings = dict(
        num_hidden_layers=2, num_heads=2, qk_dim_factor=1.0, v_dim_factor=2.0, gate_soft_cap=4.0, chunk_size=16,
        norm_eps=1e-3, weight_mode=weight_mode, autocast_kernel_dtype="float32",
    )  # fmt: skip
    ones = ("multihead_norm.weight", *(f"{name}_preact.bias" for name in ("igate", "fgate", "ifgate")), *SMALL_ONES)
    made = MlstmLayerConfig(64, 2, 2, 32, 64, eps=1e-3, gate_soft_cap=4.0)
    names = ("xlstm", "xLSTMConfig", "xLSTMModel")
    return Model(names, settings, "mlstm_layer", ones, (mlstm_layer, load_mlstm_layer), made, dict(kept=_three_states))


def _three_states(past) -> tuple:
    C, n, m = past.rnn_state[0]
    return None, MlstmState(C, n, m[..., 0])


MODELS = {
    "qwen3_next": Model(
        ("qwen3_next", "Qwen3NextConfig", "Qwen3NextModel"), QWEN | EXPERTS, "linear_attn", GATED, DELTA_NET, DELTA,
        dict(),
    ),
    "qwen3_5": Model(
        ("qwen3_5", "Qwen3_5TextConfig", "Qwen3_5TextModel"), QWEN, "linear_attn", GATED, DELTA_NET, DELTA, dict()
    ),
    "qwen3_5_moe": Model(
        ("qwen3_5_moe", "Qwen3_5MoeTextConfig", "Qwen3_5MoeTextModel"), QWEN | EXPERTS, "linear_attn", GATED, DELTA_NET,
        DELTA, dict(),
    ),
    "qwen4_exp, silu": qwen4(None, "silu"),
    "qwen4_exp, sigmoid": qwen4("sigmoid", "sigmoid"),
    "lara_mini": Model(
        ("lara_mini", "LaraMiniConfig", "LaraMiniModel"),
        QWEN | EXPERTS | dict(layer_types=["linear_attention", "sliding_attention"]), "linear_attn", GATED, DELTA_NET,
        DELTA, dict(),
    ),
    "olmo_hybrid": Model(
        ("olmo_hybrid", "OlmoHybridConfig", "OlmoHybridModel"),
        ATTENTION | dict(num_key_value_heads=2, linear_key_head_dim=96, linear_value_head_dim=192),
        "linear_attn", ("o_norm.weight",), DELTA_NET,
        GatedDeltaNetConfig(64, 2, 2, 96, 192, eps=1e-5, allow_neg_eigval=True), dict(),
    ),
    "kimi_linear": Model(
        ("kimi_linear", "KimiLinearConfig", "KimiLinearModel"), LATENT | KIMIS, "self_attn", ("o_norm.weight",), KIMI,
        KimiDeltaAttentionConfig(64, 2, 2, 16, 16, eps=1e-3, R=16), dict(),
    ),
    "bailing_hybrid": Model(
        ("bailing_hybrid", "BailingHybridConfig", "BailingHybridModel"), LATENT | dict(head_dim=16),
        "self_attn", ("o_norm.weight",), KIMI,
        KimiDeltaAttentionConfig(64, 2, 2, 16, 16, eps=1e-3, lower_bound=-5.0), dict(),
    ),
    "glm5_next, softplus": glm5(None),
    "glm5_next, lower bound": glm5(-5.0),
    "mamba2": Model(
        ("mamba2", "Mamba2Config", "Mamba2Model"),
        dict(
            num_hidden_layers=1, num_heads=4, head_dim=32, state_size=16, n_groups=2, chunk_size=32,
            layer_norm_epsilon=1e-3,
        ),
        "mixer", ("D", "norm.weight", "conv1d.bias"), MIXED, Mamba2Config(64, 2, 4, 16, 32, eps=1e-3), TRANSPOSED,
    ),
    "bamba": Model(
        ("bamba", "BambaConfig", "BambaModel"), MIXER | dict(attn_layer_indices=[1], mamba_proj_bias=True), "mamba",
        ONES, MIXED, Mamba2Config(64, 2, 4, 16, 32, eps=1e-3, in_bias=True, out_bias=True), TRANSPOSED,
    ),
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
        "mixer", ONES, MIXED,
        Mamba2Config(64, 2, 4, 16, 24, eps=1e-3, in_bias=True, out_bias=True), TRANSPOSED,
    ),
    "zamba2": Model(
        ("zamba2", "Zamba2Config", "Zamba2Model"),
        dict(
            num_hidden_layers=2, layers_block_type=["linear_attention", "hybrid"], n_mamba_heads=4, mamba_d_state=16,
            mamba_ngroups=2, num_attention_heads=2, num_key_value_heads=2, intermediate_size=64, chunk_size=32,
        ),
        "mamba", ONES, MIXED, Mamba2Config(64, 2, 4, 16, 32), TRANSPOSED,
    ),
    "falcon_h1, norm before the gate": falcon(
        dict(mamba_rms_norm=True, mamba_norm_before_gate=True), norm="before"
    ),
    "falcon_h1, norm after the gate": falcon(
        dict(mamba_rms_norm=True, mamba_norm_before_gate=False, mamba_proj_bias=True), in_bias=True
    ),
    "falcon_h1, no norm": falcon(dict(mamba_rms_norm=False, projectors_bias=True), norm=None, out_bias=True),
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
    "xlstm": xlstm("single"),
    "xlstm, fused": xlstm("fused"),
}  # fmt: skip
