"""The config of a layer, from the settings of a model of transformers."""

import math
from collections.abc import Callable, Mapping
from typing import Any

from chunkwise.layers import config
from chunkwise.shared.operators import checks

# Settings of transformers' models that no layer of linear attention reads: of the whole model, of attention, of experts
# and other blocks between, of the beginning of a training, and of programs that do not change results.
_OTHERS = frozenset(
    """
    _name_or_path architectures auto_map bos_token_id chunk_size_feed_forward dtype eos_token_id id2label
    is_encoder_decoder label2id model_type output_attentions output_hidden_states pad_token_id problem_type return_dict
    tie_word_embeddings torch_dtype transformers_version use_cache vocab_size num_logits_to_keep num_hidden_layers
    model_max_length max_position_embeddings layer_types layers_block_type hybrid_layer_ids layer_group_size
    attn_layer_indices full_attention_interval

    attention_bias attention_dropout attention_head_dim attention_hidden_size attention_in_multiplier
    attention_multiplier attention_out_multiplier head_dim key_multiplier kv_channels kv_lora_rank num_attention_heads
    num_key_value_heads num_query_groups partial_rotary_factor position_embedding_type q_lora_rank qk_head_dim
    qk_nope_head_dim qk_rope_head_dim rope_parameters rope_theta sliding_window use_mem_rope v_head_dim
    index_head_dim index_kpool index_kpool_always_select_tail index_n_heads index_topk indexer_budget
    indexer_compress_ratio indexer_head_dim indexer_kv_heads indexer_n_heads indexer_types use_long_context

    adapter_rank decoder_sparse_step embedding_multiplier first_k_dense_replace full_attn_alpha_factor
    full_attn_beta_factor hc_count hc_eps hc_lowrank hc_mult hc_sinkhorn_iters heads_per_ngram hidden_dropout
    intermediate_size linear_attn_alpha_factor linear_attn_beta_factor lm_head_multiplier logits_scaling
    make_ngram_vocab_size_divisible_by mlp_alpha_factor mlp_beta_factor mlp_bias mlp_hidden_act mlp_layer_types
    mlp_multipliers mlp_only_layers moe_intermediate_size moe_latent_size moe_renormalize
    moe_shared_expert_intermediate_size moe_shared_expert_overlap n_group n_routed_experts n_shared_experts ngram_size
    ngram_vocab_size_base norm_topk_prob num_expert_group num_experts num_experts_per_tok num_experts_per_token
    num_local_experts num_mem_blocks num_nextn_predict_layers num_shared_experts output_router_logits
    ple_conv_kernel_size ple_embed_dim ple_layer_ids
    residual_in_fp32 residual_multiplier routed_scaling_factor router_jitter_noise
    shared_expert_intermediate_size shared_intermediate_size split_ngram_parts ssm_out_multiplier swiglu_limit
    topk_group use_shared_attention_adapter number_of_conv_states

    initializer_range linear_a_log_max linear_a_log_min linear_dt_init_floor linear_dt_max linear_dt_min
    mtp_layers_block_type mtp_loss_scaling_factor rescale_prenorm_residual router_aux_loss_coef seed time_step_floor
    time_step_max time_step_rank z_loss_coefficient

    block_size chunk_size mamba_chunk_size mamba_ssm_cache_dtype pretraining_tp use_mamba_kernels use_mem_eff_path
    """.split()  # noqa: SIM905
)


def _plain(value: Any) -> Any:
    """Return a value of the file of a config, where infinity is {"__float__": "Infinity"}."""
    if isinstance(value, Mapping):
        return float(value["__float__"])
    return [_plain(entry) for entry in value] if isinstance(value, list | tuple) else value


class _Settings:
    """The settings of a model, every one of which is read, or known to concern something else."""

    def __init__(self, named: Mapping[str, Any]):
        self.named, self.done = named, set()

    def read(self, name: str) -> Any:
        """Return a setting."""
        checks.check(name in self.named, f"`hf_config` must have `{name}`; got none.")
        self.done.add(name)
        return _plain(self.named[name])

    def require(self, name: str, *values: Any) -> None:
        """Check that a setting, if it is there, has one of the values that a layer can do."""
        self.done.add(name)
        value = self.named.get(name, values[0])
        checks.check(value in values, f"`hf_config.{name}` must be one of {values} for this layer; got {value!r}.")

    def ignore(self, *names: str) -> None:
        """Pass settings that this model's layer does not read, where others read them."""
        self.done.update(names)

    def end(self) -> None:
        """Check that every setting is known."""
        unknown = sorted(set(self.named) - self.done - _OTHERS)
        checks.check(not unknown, f"`hf_config` must have no settings that `config_from` does not know; got {unknown}.")


def _delta_net(s: _Settings, **more: Any) -> config.GatedDeltaNetConfig:
    s.require("hidden_act", "silu", "swish")
    eps = s.read("rms_norm_eps")
    return config.GatedDeltaNetConfig(
        s.read("hidden_size"), s.read("linear_num_key_heads"), s.read("linear_num_value_heads"),
        s.read("linear_key_head_dim"), s.read("linear_value_head_dim"), s.read("linear_conv_kernel_dim"),
        **dict(eps=eps) | more,
    )  # fmt: skip


def _olmo_hybrid(s: _Settings) -> config.GatedDeltaNetConfig:
    # The norm of the layer has an epsilon of its own.
    return _delta_net(s, eps=1e-5, allow_neg_eigval=s.read("linear_allow_neg_eigval"))


def _qwen4_exp(s: _Settings) -> config.GatedDeltaNetConfig:
    return _delta_net(s, activation=s.read("output_gate_type") or "silu")


def _kimi(s: _Settings, ranked: bool, lower_bound: float | None = None) -> config.KimiDeltaAttentionConfig:
    s.require("hidden_act", "silu", "swish")
    heads, size = s.read("linear_num_heads"), s.read("linear_head_dim")
    return config.KimiDeltaAttentionConfig(
        s.read("hidden_size"), heads, heads, size, size, s.read("linear_conv_kernel_dim"), s.read("rms_norm_eps"),
        R=size if ranked else None, lower_bound=lower_bound,
    )  # fmt: skip


def _bailing_hybrid(s: _Settings) -> config.KimiDeltaAttentionConfig:
    # The width of the convolution has two names.
    s.require("short_conv_kernel_size", s.read("linear_conv_kernel_dim"))
    bound = s.read("kda_lower_bound")
    return _kimi(s, False, bound if s.read("kda_safe_gate") else None)


def _mamba2(s: _Settings, names: Mapping[str, str], **more: Any) -> config.Mamba2Config:
    """Return the config of a mixer whose settings have these names, or the usual ones, and of what else it has."""
    of = lambda name: s.read(names.get(name, f"mamba_{name}"))
    s.require(names.get("activation", "hidden_act"), "silu", "swish")
    limit, bias = names.get("limit"), of("proj_bias")
    low, high = (s.read(limit), math.inf) if limit else s.read("time_step_limit")
    return config.Mamba2Config(
        s.read("hidden_size"), of("n_groups"), of("n_heads"), of("d_state"), of("d_head"), of("d_conv"),
        s.read(names.get("eps", "rms_norm_eps")), of("conv_bias"), (float(low), float(high)),
        in_bias=bias, out_bias=s.read(names["out_bias"]) if "out_bias" in names else bias, **more,
    )  # fmt: skip


def _expanded(s: _Settings, made: config.Mamba2Config, expand: str) -> config.Mamba2Config:
    """Check that the channels of a mixer are as many as `expand` asks for."""
    wanted, have = int(s.read(expand) * made.D), made.HV * made.V
    checks.check(wanted == have, f"`hf_config.{expand}` must make {have} channels, those of all heads; got {wanted}.")
    return made


_MAMBA2 = dict(
    n_heads="num_heads", d_head="head_dim", n_groups="n_groups", d_state="state_size", d_conv="conv_kernel",
    conv_bias="use_conv_bias", proj_bias="use_bias", eps="layer_norm_epsilon",
)  # fmt: skip


def _mamba2_alone(s: _Settings) -> config.Mamba2Config:
    s.ignore("time_step_min")
    return _expanded(s, _mamba2(s, _MAMBA2), "expand")


def _bamba(s: _Settings) -> config.Mamba2Config:
    return _expanded(s, _mamba2(s, {}), "mamba_expand")


def _nemotron_h(s: _Settings) -> config.Mamba2Config:
    # The settings that the layer does not read, although they look like it.
    s.ignore("expand", "time_step_limit", "mamba_proj_bias")
    names = dict(n_heads="mamba_num_heads", d_head="mamba_head_dim", d_state="ssm_state_size")
    return _mamba2(s, _MAMBA2 | names | dict(activation="mamba_hidden_act", limit="time_step_min"))


def _zamba2(s: _Settings) -> config.Mamba2Config:
    # The activation is that of another block, the convolution always has a bias, and the epsilon is fixed.
    s.ignore("hidden_act", "use_conv_bias", "rms_norm_eps")
    bias = s.read("add_bias_linear")
    made = config.Mamba2Config(
        s.read("hidden_size"), s.read("mamba_ngroups"), s.read("n_mamba_heads"), s.read("mamba_d_state"),
        s.read("mamba_headdim"), s.read("mamba_d_conv"), eps=1e-5,
        dt_limit=(float(s.read("time_step_min")), math.inf), in_bias=bias, out_bias=bias,
    )  # fmt: skip
    return _expanded(s, made, "mamba_expand")


def _falcon_h1(s: _Settings) -> config.Mamba2Config:
    before = "before" if s.read("mamba_norm_before_gate") else "after"
    made = _mamba2(
        s, dict(out_bias="projectors_bias"), norm=before if s.read("mamba_rms_norm") else None,
        in_multiplier=float(s.read("ssm_in_multiplier")), multipliers=tuple(map(float, s.read("ssm_multipliers"))),
    )  # fmt: skip
    channels = s.read("mamba_d_ssm")
    if channels is None:
        return _expanded(s, made, "mamba_expand")
    s.ignore("mamba_expand")
    s.require("mamba_d_ssm", made.HV * made.V)
    return made


def _minimax(s: _Settings, layer: Any) -> config.LightningAttentionConfig:
    checks.check(layer is not None, "`layer` must be the number of the layer, which its decay depends on; got None.")
    s.require("hidden_act", "silu", "swish")
    # The norm of the layer has an epsilon of its own.
    s.ignore("rms_norm_eps")
    D, heads = s.read("hidden_size"), s.read("num_attention_heads")
    size = s.read("head_dim") or D // heads
    return config.LightningAttentionConfig(
        D, heads, heads, size, size, layer=layer, layers=s.read("num_hidden_layers")
    )  # fmt: skip


_MODELS: dict[str, Callable[..., config.LayerConfig]] = {
    "qwen3_next": _delta_net,
    "qwen3_5_text": _delta_net,
    "qwen3_5_moe_text": _delta_net,
    "lara_mini": _delta_net,
    "olmo_hybrid": _olmo_hybrid,
    "qwen4_exp_text": _qwen4_exp,
    "kimi_linear": lambda s: _kimi(s, True),
    "bailing_hybrid": _bailing_hybrid,
    "glm5_next_text": lambda s: _kimi(s, True, s.read("linear_lower_bound")),
    "mamba2": _mamba2_alone,
    "bamba": _bamba,
    "granitemoehybrid": _bamba,
    "nemotron_h": _nemotron_h,
    "zamba2": _zamba2,
    "falcon_h1": _falcon_h1,
    "minimax": _minimax,
}


def config_from(hf_config: Any, layer: int | None = None) -> config.LayerConfig:
    """Return the config of the linear attention of a model of transformers.

    Args:
      hf_config: the config of a model, or what its `to_dict()` returns; of a model with pictures, that of the whole or
        of its text.
      layer: number of the layer, from 0, which only MiniMax needs.

    Raises:
      ValueError: no layer serves the model, or it has a setting that this function does not know, or one that the layer
        cannot do; the message has its name.
    """
    named = hf_config.to_dict() if hasattr(hf_config, "to_dict") else hf_config
    checks.check(
        isinstance(named, Mapping), f"`hf_config` must be a config of transformers; got {type(hf_config).__name__}."
    )
    named = named.get("text_config") or named
    name = named.get("model_type")
    checks.check(name in _MODELS, f"`hf_config.model_type` must be one of {sorted(_MODELS)}; got {name!r}.")
    settings = _Settings(named)
    made = _MODELS[name](settings, layer) if name == "minimax" else _MODELS[name](settings)
    settings.end()
    return made
