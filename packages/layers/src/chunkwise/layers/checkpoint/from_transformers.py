"""The config of a layer from the settings of a model: from config.json, or from a config of transformers."""

import math
from collections.abc import Callable, Mapping
from typing import Any

from chunkwise.layers import config
from chunkwise.layers.checkpoint import from_fla, layer_types, rotary, settings
from chunkwise.shared.call import checks

_TABLE = settings.TABLE
# The tables with the settings of the text, in a model that has more than text.
_TEXTS = ("text_config", "llm_config", "language_config")
_SILU = ("silu", "swish")


def _delta_net(
    s: settings.Settings, eps: float | None = None, allow_neg_eigval: bool = False
) -> config.GatedDeltaNetConfig:
    s.require("hidden_act", *_SILU)
    gate, model_eps = s.word("output_gate_type"), s.number("rms_norm_eps")
    return config.GatedDeltaNetConfig(
        s.whole("hidden_size"), s.whole("linear_num_key_heads"), s.whole("linear_num_value_heads"),
        s.whole("linear_key_head_dim"), s.whole("linear_value_head_dim"), s.whole("linear_conv_kernel_dim"),
        model_eps if eps is None else eps, allow_neg_eigval, "silu" if gate == "swish" else gate,
    )  # fmt: skip


def _olmo_hybrid(s: settings.Settings) -> config.GatedDeltaNetConfig:
    # Sizes that a file leaves out follow from other sizes.
    heads = s.whole("num_attention_heads")
    H = s.whole("linear_num_key_heads") or heads
    K = s.whole("linear_key_head_dim") or int(0.75 * s.whole("hidden_size") / H)
    known = dict(
        linear_num_key_heads=H, linear_num_value_heads=heads, linear_key_head_dim=K, linear_value_head_dim=2 * K
    )
    s.defaults = {**s.defaults, **known}
    s.require("linear_use_gate", True)
    # The epsilon of the layer's norm is not the epsilon of the model.
    return _delta_net(s, eps=1e-5, allow_neg_eigval=s.flag("linear_allow_neg_eigval"))


def _kimi(s: settings.Settings, lower_bound: float | None) -> config.KimiDeltaAttentionConfig:
    # Kimi-K3 has the activation "situ" in its perceptrons; its convolutions have SiLU, as in all models.
    s.require("hidden_act", *_SILU, "situ")
    s.require("linear_allow_neg_eigval", False)
    s.ignore(_TABLE + "kda_layers", _TABLE + "full_attn_layers")
    heads = s.whole(_TABLE + "num_heads", "linear_num_heads")
    size = s.whole(_TABLE + "head_dim", "linear_head_dim")
    W = s.whole(_TABLE + "short_conv_kernel_size", "linear_conv_kernel_dim", "short_conv_kernel_size")
    full = s.flag(_TABLE + "no_kda_lora", "no_kda_lora")
    s.require("use_kda_lora", not full)
    return config.KimiDeltaAttentionConfig(
        s.whole("hidden_size"), heads, heads, size, size, W, s.number("rms_norm_eps"), None if full else size,
        lower_bound, s.flag(_TABLE + "use_full_rank_gate"),
    )  # fmt: skip


def _kimi_linear(s: settings.Settings) -> config.KimiDeltaAttentionConfig:
    bound = s.number(_TABLE + "gate_lower_bound", "gate_lower_bound", "linear_lower_bound")
    s.require(_TABLE + "safe_gate", bound is not None)
    return _kimi(s, bound)


def _glm5_next(s: settings.Settings) -> config.KimiDeltaAttentionConfig:
    # Null stands for the softplus, but in a file with a table of the layer for -5; so does a missing setting.
    names = _TABLE + "gate_lower_bound", "linear_lower_bound"
    named = [name for name in names if name in s.named]
    bound = s.number(named[0]) if named else -5.0
    s.ignore(*names)
    nested = any(name.startswith(_TABLE) for name in s.named)
    if s.flag(_TABLE + "safe_gate") and nested and bound is None:
        bound = -5.0
    return _kimi(s, bound)


def _is_ling_2(named: Mapping[str, Any]) -> bool:
    """Return whether a file of the type bailing_hybrid has lightning attention; Ling 3.0 has Kimi delta attention."""
    names, found = [name for name in named if isinstance(name, str)], named.get("architectures")
    listed = str(found) if isinstance(found, list | tuple) and all(isinstance(x, str) for x in found) else ""
    third = "V3" in listed or any("kda" in name or name == "short_conv_kernel_size" for name in names)
    second = "V2" in listed or not {"group_norm_size", "linear_silu"}.isdisjoint(names)
    checks.check(
        third or second,
        "`hf_config` must have a setting that tells Ling 2.x from Ling 3.0, such as `group_norm_size` or "
        "`kda_safe_gate`, where `model_type` is bailing_hybrid; got none.",
    )
    return not third


def _bailing_hybrid(s: settings.Settings) -> config.KimiDeltaAttentionConfig:
    s.require_each(group_norm_size=1, linear_silu=True, linear_attention="kda", value_norm=False)
    # The class of transformers replaces the size of heads by the size of rotary positions.
    heads, size = s.whole("num_attention_heads"), s.whole("head_dim")
    s.require("num_kv_heads_for_linear_attn", 0, heads)
    s.defaults = {**s.defaults, _TABLE + "num_heads": heads, _TABLE + "head_dim": size}
    bound, safe = s.number("kda_lower_bound"), s.flag("kda_safe_gate")
    return _kimi(s, bound if safe else None)


def _mamba2(s: settings.Settings, names: Mapping[str, str], size: int, **more: Any) -> config.Mamba2Config:
    """Return the config of a mixer: `names` has unusual names of settings, one or two, and `more` has further fields.

    The limit of time steps is in `time_step_limit`; `time_step_min` is for the weights of a new model.
    """
    of = lambda kind, name: getattr(s, kind)(*names.get(name, f"mamba_{name}").split())
    s.require(names.get("activation", "hidden_act"), *_SILU)
    bias = of("flag", "proj_bias")
    return config.Mamba2Config(
        s.whole("hidden_size"), of("whole", "n_groups"), of("whole", "n_heads"), of("whole", "d_state"), size,
        of("whole", "d_conv"), s.number(names.get("eps", "rms_norm_eps")), of("flag", "conv_bias"),
        s.limit("time_step_limit", "mamba_dt_limit"), in_bias=bias,
        out_bias=of("flag", "out_bias") if "out_bias" in names else bias, **more,
    )  # fmt: skip


def _expanded(s: settings.Settings, sizes: config.Mamba2Config, expand: str, *others: str) -> config.Mamba2Config:
    """Check that a mixer has as many channels as the setting `expand`, or one of the names `others`, asks for."""
    wanted, have = int(s.number(expand, *others) * sizes.D), sizes.HV * sizes.V
    checks.check(wanted == have, f"`hf_config.{expand}` must make {have} channels, those of all heads; got {wanted}.")
    return sizes


def _head_size(s: settings.Settings, channels: int) -> int:
    """Return the channels of a head, which follow from `channels` if a file leaves them out."""
    if s.named.get("mamba_d_head") in ("auto", None):
        s.ignore("mamba_d_head")
        return channels // s.whole("mamba_n_heads")
    return s.whole("mamba_d_head")


_MAMBA2 = dict(
    n_heads="num_heads", n_groups="n_groups mamba_num_groups", d_state="state_size", d_conv="conv_kernel",
    conv_bias="use_conv_bias", proj_bias="use_bias", eps="layer_norm_epsilon",
)  # fmt: skip


def _mamba2_alone(s: settings.Settings) -> config.Mamba2Config:
    # Old files have the place of the norm, which no version of transformers reads.
    s.ignore("norm_before_gate")
    s.require("rms_norm", True)
    return _expanded(s, _mamba2(s, _MAMBA2, s.whole("head_dim")), "expand")


def _bamba(s: settings.Settings) -> config.Mamba2Config:
    size = _head_size(s, int(s.number("mamba_expand") * s.whole("hidden_size")))
    return _expanded(s, _mamba2(s, {}, size), "mamba_expand")


def _nemotron_h(s: settings.Settings) -> config.Mamba2Config:
    # The layer does not read these settings, although their names suggest it.
    s.ignore("expand", "mamba_proj_bias")
    names = dict(n_heads="mamba_num_heads", d_state="ssm_state_size", activation="mamba_hidden_act")
    return _mamba2(s, _MAMBA2 | names, s.whole("mamba_head_dim"))


def _zamba2(s: settings.Settings) -> config.Mamba2Config:
    # This activation is for another block, the convolution always has a bias, and the epsilon is fixed.
    s.ignore("hidden_act", "use_conv_bias", "rms_norm_eps")
    bias, D, size = s.flag("add_bias_linear"), s.whole("hidden_size"), s.whole("mamba_headdim")
    channels = int(s.number("mamba_expand", "expansion_factor") * D)
    # Old files have only the channels of a head, and the class of transformers has the number of heads.
    heads = s.whole("n_mamba_heads") or (channels // size if size else 8)
    sizes = config.Mamba2Config(
        D, s.whole("mamba_ngroups"), heads, s.whole("mamba_d_state", "state_size"), size or channels // heads,
        s.whole("mamba_d_conv", "conv_dimension"), eps=1e-5, dt_limit=s.limit("time_step_limit"),
        in_bias=bias, out_bias=bias,
    )  # fmt: skip
    return _expanded(s, sizes, "mamba_expand", "expansion_factor")


def _falcon_h1(s: settings.Settings) -> config.Mamba2Config:
    s.ignore("mamba_d_ssm", "mamba_expand")
    # Only if this is null, and not missing, `mamba_expand` says how many channels there are.
    expanded, channels = s.is_null("mamba_d_ssm"), s.whole("mamba_d_ssm")
    if expanded:
        channels = int(s.number("mamba_expand") * s.whole("hidden_size"))
    # transformers asks whether this is true, so that null is False, and only a file without it has the default.
    before = "before" if s.flag("mamba_norm_before_gate") and not s.is_null("mamba_norm_before_gate") else "after"
    sizes = _mamba2(
        s, dict(out_bias="projectors_bias"), _head_size(s, channels), norm=before if s.flag("mamba_rms_norm") else None,
        in_multiplier=s.number("ssm_in_multiplier"), multipliers=s.factors("ssm_multipliers"),
    )  # fmt: skip
    if expanded:
        return _expanded(s, sizes, "mamba_expand")
    have = sizes.HV * sizes.V
    checks.check(
        channels == have, f"`hf_config.mamba_d_ssm` must be one of {(have,)} for this layer; got {channels!r}."
    )
    return sizes


def _minimax(s: settings.Settings, layer: int | None) -> config.LightningAttentionConfig:
    layer = layer_types.given(layer, "which its decay depends on")
    s.require("hidden_act", *_SILU)
    # The epsilon of the layer's norm is not the epsilon of the model.
    s.ignore("rms_norm_eps")
    D, heads = s.whole("hidden_size"), s.whole("num_attention_heads")
    size = s.whole("head_dim") or D // heads
    return config.LightningAttentionConfig(
        D, heads, heads, size, size, layer=layer, layers=s.whole("num_hidden_layers")
    )  # fmt: skip


def _heads(s: settings.Settings, *names: str) -> int:
    """Return a number of heads that is a power of two: for others the slopes of these models are not in order."""
    heads = s.whole(*names)
    power = heads & (heads - 1) == 0
    checks.check(power, f"`hf_config.{names[0]}` must be a power of 2 for this layer; got {heads}.")
    return heads


def _ling_2(s: settings.Settings, layer: int | None) -> config.LightningAttentionConfig:
    layer = layer_types.given(layer, "which its decay depends on")
    s.require_each(use_bias=False, use_qkv_bias=False, linear_rope=True)
    D, heads, layers = s.whole("hidden_size"), _heads(s, "num_attention_heads"), s.whole("num_hidden_layers")
    size = s.whole("head_dim") or D // heads
    found, scale = rotary.frequencies(s, size)
    return config.LightningAttentionConfig(
        D, heads, heads, size, size, eps=s.number("rms_norm_eps"), layer=layer, layers=layers,
        # The authors count layers from 1 here, and from 0 elsewhere.
        slope_factor=1 - (layer - 1) / max(layers - 1, 1) + 1e-5, activation="silu" if s.flag("linear_silu") else None,
        scale=size**-0.5, qk_norm=s.flag("use_qk_norm"), frequencies=found, rotary_scale=scale,
        groups=s.whole("group_norm_size"),
    )  # fmt: skip


def _minicpm_sala(s: settings.Settings) -> config.LightningAttentionConfig:
    # These settings are those of the layers with sparse attention.
    s.ignore("attn_use_output_gate")
    s.require("attention_bias", False)
    H, size = _heads(s, "lightning_nh"), s.whole("lightning_head_dim")
    s.require("lightning_nkv", H)
    law = s.word("lightning_scale")
    found, scale = rotary.frequencies(s, size) if s.flag("lightning_use_rope") else ((), 1.0)
    return config.LightningAttentionConfig(
        s.whole("hidden_size"), H, H, size, size, eps=s.number("rms_norm_eps"), slope_factor=1.0, activation=None,
        scale={"1/sqrt(d)": size**-0.5, "1/d": 1 / size}.get(law, 1.0), qk_norm=s.flag("qk_norm"), frequencies=found,
        rotary_scale=scale, groups=1 if s.flag("use_output_norm") else None, gate=s.flag("use_output_gate"),
    )  # fmt: skip


def _xlstm(s: settings.Settings) -> config.MlstmLayerConfig:
    slstm = s.named.get("slstm_at") or s.named.get("slstm_block")
    checks.check(
        not slstm,
        f"`hf_config` must have no sLSTM blocks, a recurrence that mixes channels, which no layer here "
        f"serves; got {settings.shown(slstm)}.",
    )
    s.require("use_bias", False)
    D, heads = s.whole("hidden_size", "embedding_dim"), s.whole("num_heads")
    q, v = (int(s.number(f"{name}_dim_factor") * D) for name in ("qk", "v"))
    for name, n in dict(qk=q, v=v).items():
        fits = n > 0 and n % heads == 0
        checks.check(fits, f"`hf_config.{name}_dim_factor` must make a multiple of {heads} channels; got {n}.")
    # Null is a value: there is no cap.
    cap = None if s.is_null("gate_soft_cap") else s.number("gate_soft_cap")
    return config.MlstmLayerConfig(
        D, heads, heads, q // heads, v // heads, eps=s.number("norm_eps"), gate_soft_cap=cap,
        divisor_eps=s.number("eps"),
    )  # fmt: skip


# The defaults of transformers for settings that a file leaves out.
_DELTA = dict(
    hidden_size=2048, linear_num_key_heads=16, linear_num_value_heads=32, linear_key_head_dim=128,
    linear_value_head_dim=128, linear_conv_kernel_dim=4, rms_norm_eps=1e-6, output_gate_type="silu",
)  # fmt: skip
_OLMO = dict(
    hidden_size=3840, num_attention_heads=30, linear_num_key_heads=None, linear_key_head_dim=None,
    linear_allow_neg_eigval=True,
)  # fmt: skip
_KIMI = {
    "hidden_size": 2304, "rms_norm_eps": 1e-5, _TABLE + "num_heads": 32, _TABLE + "head_dim": 128,
    _TABLE + "short_conv_kernel_size": 4, _TABLE + "no_kda_lora": False, _TABLE + "use_full_rank_gate": False,
    _TABLE + "gate_lower_bound": None,
}  # fmt: skip
_LING = {
    "hidden_size": 2560, "rms_norm_eps": 1e-6, "num_attention_heads": 32, "head_dim": 128, "kda_lower_bound": -5.0,
    "kda_safe_gate": True, _TABLE + "no_kda_lora": True,
}  # fmt: skip
_GLM = {
    "hidden_size": 4096, _TABLE + "num_heads": 64, _TABLE + "safe_gate": True,
    "linear_lower_bound": None,
}  # fmt: skip
_MIXER = dict(
    hidden_size=4096, rms_norm_eps=1e-5, mamba_n_heads=128, mamba_d_head="auto", mamba_n_groups=1, mamba_d_state=256,
    mamba_d_conv=4, mamba_expand=2, mamba_conv_bias=True, mamba_proj_bias=False, time_step_limit=(0.0, math.inf),
)  # fmt: skip
_STATE_SPACE = dict(
    hidden_size=4096, num_heads=128, head_dim=64, state_size=128, expand=2, conv_kernel=4, n_groups=8, use_bias=False,
    use_conv_bias=True, layer_norm_epsilon=1e-5, time_step_limit=(0.0, math.inf),
)  # fmt: skip
_NEMOTRON = dict(mamba_num_heads=128, mamba_head_dim=64, ssm_state_size=128)
_ZAMBA = dict(
    hidden_size=2560, n_mamba_heads=None, mamba_headdim=None, mamba_d_state=64, mamba_ngroups=1, mamba_d_conv=4,
    mamba_expand=2, add_bias_linear=False, time_step_limit=(0.0, math.inf),
)  # fmt: skip
_FALCON = dict(
    mamba_d_ssm=1024, mamba_norm_before_gate=True, mamba_rms_norm=False, projectors_bias=False, ssm_in_multiplier=1.0,
    ssm_multipliers=(1.0,) * 5,
)  # fmt: skip
_MINIMAX = dict(hidden_size=4096, num_attention_heads=32, num_hidden_layers=32, head_dim=None)
_LING_2 = dict(
    hidden_size=2048, num_attention_heads=16, num_hidden_layers=20, head_dim=None, rms_norm_eps=1e-6, use_qk_norm=True,
    group_norm_size=4, linear_silu=False, rope_theta=600000.0, partial_rotary_factor=0.5, max_position_embeddings=32768,
)  # fmt: skip
_SALA = dict(
    hidden_size=4096, lightning_nh=32, lightning_head_dim=128, lightning_scale="1/sqrt(d)", lightning_use_rope=True,
    rms_norm_eps=1e-6, qk_norm=True, use_output_norm=False, use_output_gate=False, rope_theta=10000.0,
    max_position_embeddings=2048,
)  # fmt: skip
_XLSTM = dict(
    hidden_size=4096, num_heads=8, qk_dim_factor=0.5, v_dim_factor=1.0, norm_eps=1e-6, eps=1e-6, gate_soft_cap=15.0
)
# The function that reads the settings of a model, and the model's defaults.
_MODELS: dict[str, tuple[Callable[..., config.LayerConfig], Mapping[str, Any]]] = {
    "qwen3_next": (_delta_net, _DELTA),
    "qwen3_5_text": (_delta_net, _DELTA | dict(hidden_size=4096)),
    "qwen3_5_moe_text": (_delta_net, _DELTA),
    "qwen4_exp_text": (_delta_net, _DELTA),
    "lara_mini": (_delta_net, _DELTA | dict(hidden_size=1024, linear_num_key_heads=8, linear_num_value_heads=16)),
    "olmo_hybrid": (_olmo_hybrid, _DELTA | _OLMO),
    "kimi_linear": (_kimi_linear, _KIMI),
    "bailing_hybrid": (_bailing_hybrid, _KIMI | _LING),
    "glm5_next_text": (_glm5_next, _KIMI | _GLM),
    "mamba2": (_mamba2_alone, _STATE_SPACE),
    "bamba": (_bamba, _MIXER),
    "granitemoehybrid": (_bamba, _MIXER | dict(rms_norm_eps=1e-6)),
    "nemotron_h": (_nemotron_h, _STATE_SPACE | _NEMOTRON),
    "zamba2": (_zamba2, _ZAMBA),
    "falcon_h1": (_falcon_h1, _MIXER | _FALCON),
    "minimax": (_minimax, _MINIMAX),
    "bailing_moe_linear": (_ling_2, _LING_2),
    "minicpm_sala": (_minicpm_sala, _SALA),
    "xlstm": (_xlstm, _XLSTM),
    "gated_deltanet": (from_fla.gated_deltanet, from_fla.GROUPED),
    "kda": (from_fla.kda, from_fla.GROUPED | dict(num_heads=16, head_dim=128, expand_v=1.0)),
    "gla": (from_fla.gla, from_fla.GLA),
    "comba": (from_fla.comba, from_fla.COMBA),
    "gdn2": (from_fla.gdn2, from_fla.GDN2),
    "mamba2_fla": (from_fla.mamba2, from_fla.MAMBA2),
    "delta_net": (from_fla.delta_net, from_fla.DELTA_NET),
    "gated_deltaproduct": (from_fla.gated_deltaproduct, from_fla.PRODUCT),
    "rwkv7": (from_fla.rwkv7, from_fla.RWKV7),
}
# The models whose layers differ by their number.
_BY_NUMBER = ("minimax", "bailing_moe_linear", "rwkv7")
# Names under which models are published, with the name in `_MODELS`.
_PUBLISHED = dict(
    kimi_k3="kimi_linear", bailing_moe_v3="bailing_hybrid", bailing_moe_v3_vl="bailing_hybrid",
    minimax_text_01="minimax", minimax_m1="minimax",
)  # fmt: skip


def _text(named: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the settings of the text of a model, with a model type, which may be the type of the whole model."""
    while name := next((each for each in _TEXTS if named.get(each) is not None), None):
        text = named[name]
        table = isinstance(text, Mapping)
        checks.check(table, f"`hf_config.{name}` must be a table of settings; got {settings.shown(text)}.")
        named = {"model_type": named.get("model_type"), **text}
    return named


def config_from(hf_config: Any, layer: int | None = None) -> config.LayerConfig:
    """Return the config of the linear attention of a model.

    The call is::

        config = config_from(json.loads((directory / "config.json").read_text()), layer=0)

    A setting that `hf_config` leaves out, or has as null, is the default of transformers. For models of
    flash-linear-attention it is the default there. Names that have nothing to do with linear attention, such as names
    that a fine-tune or a quantization adds, are not read.

    Args:
      hf_config: the content of a model's config.json, as published or as transformers saves it; or a config of
        transformers, or the result of its `to_dict()`. For a model that also reads pictures, the whole config or the
        config of its text. A released file of RWKV-7 has no config: then it is the arrays of the file by name.
      layer: number of the layer, from 0. MiniMax and Ling 2.x need it, because their decays depend on it, and RWKV-7,
        whose first layer differs; for every model a layer without linear attention is refused.

    Raises:
      ValueError: no layer here serves the model; it has no linear attention, or not in this layer; a setting has
        another type than it should; or the model has a setting of linear attention that this function does not know or
        that the layer cannot do. The message names it.
    """
    named = hf_config.to_dict() if hasattr(hf_config, "to_dict") else hf_config
    checks.check(
        isinstance(named, Mapping), f"`hf_config` must be a config of transformers; got {type(hf_config).__name__}."
    )
    if from_fla.is_released(named):
        return from_fla.released(named, layer)
    named = _text(named)
    kind = named.get("model_type")
    name = _PUBLISHED.get(kind, kind) if isinstance(kind, str) else ""
    name = f"{name}_text" if f"{name}_text" in _MODELS else name
    name = "bailing_moe_linear" if kind == "bailing_hybrid" and _is_ling_2(named) else name
    name = "mamba2_fla" if kind == "mamba2" and from_fla.is_mamba2(named) else name
    known = sorted({*_MODELS, *_PUBLISHED} - {"mamba2_fla"})
    checks.check(name in _MODELS, f"`hf_config.model_type` must be one of {known}; got {settings.shown(kind)}.")
    make, defaults = _MODELS[name]
    read = settings.Settings(named, defaults)
    layer_types.check_layer(read, name, layer)
    found = make(read, layer) if name in _BY_NUMBER else make(read)
    read.end()
    return found
