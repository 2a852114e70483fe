"""The models of transformers whose linear attention a layer serves, each small and with random weights."""

import functools
from typing import NamedTuple

from chunkwise import layers
from chunkwise.layers import GatedDeltaNetConfig, KimiDeltaAttentionConfig, Mamba2Config
from chunkwise.pipeline import MlstmState
from tests_e2e.layers.recording import ATTENTION, build, conv_and_state, randomise


class Model(NamedTuple):
    """A model of transformers, and our layer.

    Attributes:
      module: of the model.
      name: what the names of its configuration and of the model without a head begin with.
      settings: of the configuration.
      attribute: of its first block, the layer.
      ones: the layer's parameters that are ones or zeros at first.
      config: the sizes of our layer.
    """

    module: str
    name: str
    settings: dict
    attribute: str
    ones: tuple[str, ...]
    config: layers.LayerConfig

    @property
    def functions(self):
        """Our layer, and what makes its weights."""
        name = FUNCTIONS[type(self.config)]
        return getattr(layers, name), getattr(layers, f"load_{name}")

    @property
    def kept(self):
        """What reads the inputs of the convolution and the state out of a cache of transformers."""
        return KEPT.get(type(self.config), conv_and_state)

    def build(self, **change):
        """Return the model, with changed settings, and the layer of its first block."""
        if self.settings.get("weight_mode") == "fused":
            mend_first_weights()
        model = build(self.module, f"{self.name}Config", f"{self.name}Model", **self.settings | change)
        layer = getattr((model.blocks if self.module == "xlstm" else model.layers)[0], self.attribute)
        if self.module in ("nemotron_h", "zamba2"):
            # transformers takes `time_step_min` for the least step in a prefill, which the trained models do not have.
            layer.time_step_limit = tuple(getattr(model.config, "time_step_limit", None) or (0.0, float("inf")))
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
FUNCTIONS = {
    GatedDeltaNetConfig: "gated_delta_net", KimiDeltaAttentionConfig: "kimi_delta_attention",
    Mamba2Config: "mamba2_mixer", layers.LightningAttentionConfig: "lightning_attention",
    layers.MlstmLayerConfig: "mlstm_layer",
}  # fmt: skip


def _three_states(past) -> tuple:
    C, n, m = past.rnn_state[0]
    return None, MlstmState(C, n, m[..., 0])


KEPT = {
    Mamba2Config: functools.partial(conv_and_state, transposed=True), layers.MlstmLayerConfig: _three_states,
    layers.LightningAttentionConfig: lambda past: (None, past.get_linear_cache(0)),
}  # fmt: skip
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
GATED = ("dt_bias", "norm.weight")
SCALED = MIXER | dict(mamba_d_ssm=128, ssm_in_multiplier=0.5, ssm_multipliers=[0.5, 1.5, 0.7, 1.2, 0.8])
MULTIPLIERS = dict(eps=1e-3, in_multiplier=0.5, multipliers=(0.5, 1.5, 0.7, 1.2, 0.8))


def falcon(settings: dict, **config) -> Model:
    """Return Falcon-H1 with some of its settings."""
    made = Mamba2Config(64, 2, 4, 16, 32, **MULTIPLIERS | config)
    return Model("falcon_h1", "FalconH1", SCALED | settings, "mamba", ONES, made)


def qwen4(gate: str | None, activation: str) -> Model:
    """Return Qwen4-Exp with a gate of its norm."""
    settings = QWEN | EXPERTS | INDEXED | dict(
        output_gate_type=gate, hc_lowrank=8, indexer_n_heads=2, indexer_kv_heads=1, indexer_head_dim=32,
        indexer_budget=64, indexer_compress_ratio=4,
    )  # fmt: skip
    made = GatedDeltaNetConfig(64, 2, 4, 16, 24, eps=1e-3, activation=activation)
    return Model("qwen4_exp", "Qwen4ExpText", settings, "linear_attn", GATED, made)


def glm5(lower_bound: float | None) -> Model:
    """Return GLM-5-next with a law of its decay."""
    settings = LATENT | KIMIS | INDEXED | dict(
        q_lora_rank=16, qk_rope_head_dim=0, linear_lower_bound=lower_bound, index_topk=32, index_head_dim=16,
        index_n_heads=2,
    )  # fmt: skip
    made = KimiDeltaAttentionConfig(64, 2, 2, 16, 16, eps=1e-3, R=16, lower_bound=lower_bound)
    return Model("glm5_next", "Glm5NextText", settings, "self_attn", ("o_norm.weight", "forget_gate.dt_bias"), made)


def xlstm(weight_mode: str) -> Model:
    """Return xLSTM with its matrices under names of their own or fused."""
    settings = dict(
        num_hidden_layers=2, num_heads=2, qk_dim_factor=1.0, v_dim_factor=2.0, gate_soft_cap=4.0, chunk_size=16,
        norm_eps=1e-3, weight_mode=weight_mode, autocast_kernel_dtype="float32",
    )  # fmt: skip
    ones = ("multihead_norm.weight", *(f"{name}_preact.bias" for name in ("igate", "fgate", "ifgate")), *SMALL_ONES)
    made = layers.MlstmLayerConfig(64, 2, 2, 32, 64, eps=1e-3, gate_soft_cap=4.0)
    return Model("xlstm", "xLSTM", settings, "mlstm_layer", ones, made)


MODELS = {
    "qwen3_next": Model("qwen3_next", "Qwen3Next", QWEN | EXPERTS, "linear_attn", GATED, DELTA),
    "qwen3_5": Model("qwen3_5", "Qwen3_5Text", QWEN, "linear_attn", GATED, DELTA),
    "qwen3_5_moe": Model("qwen3_5_moe", "Qwen3_5MoeText", QWEN | EXPERTS, "linear_attn", GATED, DELTA),
    "qwen4_exp, silu": qwen4(None, "silu"),
    "qwen4_exp, sigmoid": qwen4("sigmoid", "sigmoid"),
    "lara_mini": Model(
        "lara_mini", "LaraMini", QWEN | EXPERTS | dict(layer_types=["linear_attention", "sliding_attention"]),
        "linear_attn", GATED, DELTA,
    ),
    "olmo_hybrid": Model(
        "olmo_hybrid", "OlmoHybrid",
        ATTENTION | dict(num_key_value_heads=2, linear_key_head_dim=96, linear_value_head_dim=192),
        "linear_attn", ("o_norm.weight",),
        GatedDeltaNetConfig(64, 2, 2, 96, 192, eps=1e-5, allow_neg_eigval=True),
    ),
    "kimi_linear": Model(
        "kimi_linear", "KimiLinear", LATENT | KIMIS, "self_attn", ("o_norm.weight",),
        KimiDeltaAttentionConfig(64, 2, 2, 16, 16, eps=1e-3, R=16),
    ),
    "bailing_hybrid": Model(
        "bailing_hybrid", "BailingHybrid", LATENT | dict(head_dim=16), "self_attn", ("o_norm.weight",),
        KimiDeltaAttentionConfig(64, 2, 2, 16, 16, eps=1e-3, lower_bound=-5.0),
    ),
    "glm5_next, softplus": glm5(None),
    "glm5_next, lower bound": glm5(-5.0),
    "mamba2": Model(
        "mamba2", "Mamba2",
        dict(
            num_hidden_layers=1, num_heads=4, head_dim=32, state_size=16, n_groups=2, chunk_size=32,
            layer_norm_epsilon=1e-3,
        ),
        "mixer", ("D", "norm.weight", "conv1d.bias"), Mamba2Config(64, 2, 4, 16, 32, eps=1e-3),
    ),
    "bamba": Model(
        "bamba", "Bamba", MIXER | dict(attn_layer_indices=[1], mamba_proj_bias=True), "mamba", ONES,
        Mamba2Config(64, 2, 4, 16, 32, eps=1e-3, in_bias=True, out_bias=True),
    ),
    "granitemoehybrid": Model(
        "granitemoehybrid", "GraniteMoeHybrid",
        MIXER | dict(
            layer_types=["linear_attention", "full_attention"], num_local_experts=2, num_experts_per_tok=1,
            shared_intermediate_size=32,
        ),
        "mamba", ONES, Mamba2Config(64, 2, 4, 16, 32, eps=1e-3),
    ),
    "nemotron_h": Model(
        "nemotron_h", "NemotronH",
        dict(
            layers_block_type=["linear_attention", "full_attention"], num_attention_heads=2, num_key_value_heads=1,
            head_dim=32, intermediate_size=64, mamba_num_heads=4, mamba_head_dim=24, ssm_state_size=16, n_groups=2,
            chunk_size=32, layer_norm_epsilon=1e-3, use_bias=True,
        ),
        "mixer", ONES, Mamba2Config(64, 2, 4, 16, 24, eps=1e-3, in_bias=True, out_bias=True),
    ),
    "zamba2": Model(
        "zamba2", "Zamba2",
        dict(
            num_hidden_layers=2, layers_block_type=["linear_attention", "hybrid"], n_mamba_heads=4, mamba_d_state=16,
            mamba_ngroups=2, num_attention_heads=2, num_key_value_heads=2, intermediate_size=64, chunk_size=32,
        ),
        "mamba", ONES, Mamba2Config(64, 2, 4, 16, 32),
    ),
    "falcon_h1, norm before the gate": falcon(
        dict(mamba_rms_norm=True, mamba_norm_before_gate=True), norm="before"
    ),
    "falcon_h1, norm after the gate": falcon(
        dict(mamba_rms_norm=True, mamba_norm_before_gate=False, mamba_proj_bias=True), in_bias=True
    ),
    "falcon_h1, no norm": falcon(dict(mamba_rms_norm=False, projectors_bias=True), norm=None, out_bias=True),
    "minimax": Model(
        "minimax", "MiniMax",
        dict(
            num_hidden_layers=3, layer_types=["linear_attention", "linear_attention", "full_attention"],
            num_attention_heads=4, num_key_value_heads=2, head_dim=16, block_size=32, intermediate_size=64,
            num_local_experts=2,
        ),
        "self_attn", ("norm.weight",), layers.LightningAttentionConfig(64, 4, 4, 16, 16, layer=0, layers=3),
    ),
    "xlstm": xlstm("single"),
    "xlstm, fused": xlstm("fused"),
}  # fmt: skip
