"""The config of a layer from the settings of a model: from config.json, or from a config of transformers."""

import math
import re
from collections.abc import Callable, Mapping
from typing import Any

from chunkwise.layers import config
from chunkwise.shared.call import checks

# Only settings with one of these words in their name can change a layer of linear attention.
_CONCERNS = re.compile(
    r"(^|use_)linear|linear_att|mamba|kda|gdn|delta|lightning|(^|_)ssm|(^|_)conv(_|\d|$)|time_step|(^|_)dt_|decay|eigval|lower_bound"
    r"|(norm|gate)_(before|after)|group_norm|output_gate|safe_gate|full_rank"
)
# Settings with such a word that change no layer: for the start of training, the type and place of states, programs,
# other layers, attention and experts.
_OTHERS = frozenset(
    """
    linear_a_log_max linear_a_log_min linear_dt_init_floor linear_dt_max linear_dt_min time_step_floor
    time_step_init_scheme time_step_max time_step_rank time_step_scale weight_decay

    mamba_chunk_size mamba_ssm_cache_dtype mamba_ssm_dtype use_mamba_kernels use_mambapy

    activation_situ_linear_beta attention_output_gate attn_output_gate linear_attn_alpha_factor linear_attn_beta_factor
    layernorm_linear_attention_alpha layernorm_linear_attention_beta mamba_use_mlp mla_use_output_gate mtp_use_kda
    number_of_conv_states ple_conv_kernel_size ssm_out_multiplier
    """.split()  # noqa: SIM905
)
_BEGINNING = "initializer_range"
# The table in which Kimi and GLM have the settings of the layer.
_TABLE = "linear_attn_config."
# The tables with the settings of the text, in a model that has more than text.
_TEXTS = ("text_config", "llm_config", "language_config")
_SILU = ("silu", "swish")


def _plain(value: Any) -> Any:
    """Return a value from config.json, in which infinity is {"__float__": "Infinity"}."""
    if isinstance(value, Mapping):
        return float(value["__float__"]) if "__float__" in value else value
    return [_plain(entry) for entry in value] if isinstance(value, list | tuple) else value


class _Settings:
    """The settings of a model. Every setting whose name is of concern must be read, required, or ignored.

    Args:
      named: the settings; a setting in `linear_attn_config` has a name such as _TABLE + "head_dim".
      defaults: the defaults of transformers for settings that are missing or null, by the first of their names.
    """

    def __init__(self, named: Mapping[str, Any], defaults: Mapping[str, Any]):
        nested = named.get("linear_attn_config") or {}
        self.named = dict(named) | {_TABLE + name: value for name, value in nested.items()}
        self.named.pop("linear_attn_config", None)
        self.defaults, self.done = defaults, set()

    def has(self, name: str) -> bool:
        """Return whether there is a setting, and it is not null."""
        return self.named.get(name) is not None

    def read(self, name: str, *others: str) -> Any:
        """Return a setting that may have several names, or its default."""
        self.done.update((name, *others))
        there = [each for each in (name, *others) if self.has(each)]
        if not there:
            return self.defaults[name]
        value = _plain(self.named[there[0]])
        for each in there[1:]:
            self.require(each, value)
        return value

    def require(self, name: str, *values: Any) -> None:
        """Check that a setting, if there is one, has one of these values, which are all that the layer can do."""
        self.done.add(name)
        if self.has(name):
            value = _plain(self.named[name])
            checks.check(value in values, f"`hf_config.{name}` must be one of {values} for this layer; got {value!r}.")

    def ignore(self, *names: str) -> None:
        """Allow settings that this model's layer does not read, although other models' layers do."""
        self.done.update(names)

    def end(self) -> None:
        """Check that every setting that may change the layer is known."""
        left = set(self.named) - self.done - _OTHERS
        unknown = sorted(name for name in left if _CONCERNS.search(name) and not name.endswith(_BEGINNING))
        checks.check(not unknown, f"`hf_config` must have no settings that `config_from` does not know; got {unknown}.")


def _delta_net(s: _Settings, **more: Any) -> config.GatedDeltaNetConfig:
    s.require("hidden_act", *_SILU)
    gate = s.read("output_gate_type")
    options: dict[str, Any] = dict(eps=s.read("rms_norm_eps"), activation="silu" if gate == "swish" else gate)
    return config.GatedDeltaNetConfig(
        s.read("hidden_size"), s.read("linear_num_key_heads"), s.read("linear_num_value_heads"),
        s.read("linear_key_head_dim"), s.read("linear_value_head_dim"), s.read("linear_conv_kernel_dim"),
        **options | more,
    )  # fmt: skip


def _olmo_hybrid(s: _Settings) -> config.GatedDeltaNetConfig:
    # Sizes that a file leaves out follow from other sizes.
    heads = s.read("num_attention_heads")
    H = s.read("linear_num_key_heads") or heads
    K = s.read("linear_key_head_dim") or int(0.75 * s.read("hidden_size") / H)
    known = dict(
        linear_num_key_heads=H, linear_num_value_heads=heads, linear_key_head_dim=K, linear_value_head_dim=2 * K
    )
    s.defaults = {**s.defaults, **known}
    s.require("linear_use_gate", True)
    # The epsilon of the layer's norm is not the epsilon of the model.
    return _delta_net(s, eps=1e-5, allow_neg_eigval=s.read("linear_allow_neg_eigval"))


def _kimi(s: _Settings, **more: Any) -> config.KimiDeltaAttentionConfig:
    # Kimi-K3 has the activation "situ" in its perceptrons; its convolutions have SiLU, as in all models.
    s.require("hidden_act", *_SILU, "situ")
    s.require("linear_allow_neg_eigval", False)
    s.ignore(_TABLE + "kda_layers", _TABLE + "full_attn_layers")
    heads = s.read(_TABLE + "num_heads", "linear_num_heads")
    size = s.read(_TABLE + "head_dim", "linear_head_dim")
    W = s.read(_TABLE + "short_conv_kernel_size", "linear_conv_kernel_dim", "short_conv_kernel_size")
    full = s.read(_TABLE + "no_kda_lora", "no_kda_lora")
    s.require("use_kda_lora", not full)
    options: dict[str, Any] = dict(R=None if full else size, full_rank_gate=s.read(_TABLE + "use_full_rank_gate"))
    return config.KimiDeltaAttentionConfig(
        s.read("hidden_size"), heads, heads, size, size, W, s.read("rms_norm_eps"), **options | more
    )


def _kimi_linear(s: _Settings) -> config.KimiDeltaAttentionConfig:
    bound = s.read(_TABLE + "gate_lower_bound", "gate_lower_bound", "linear_lower_bound")
    s.require(_TABLE + "safe_gate", bound is not None)
    return _kimi(s, lower_bound=bound)


def _glm5_next(s: _Settings) -> config.KimiDeltaAttentionConfig:
    # Null stands for the softplus, but in a file with a table of the layer for -5.
    bound = s.named.get("linear_lower_bound", -5.0)
    nested = [name for name in s.named if name.startswith(_TABLE)]
    bound = s.named.get(_TABLE + "gate_lower_bound", bound)
    if nested and bound is None and s.named.get(_TABLE + "safe_gate", True):
        bound = -5.0
    s.ignore("linear_lower_bound", _TABLE + "gate_lower_bound", _TABLE + "safe_gate")
    return _kimi(s, lower_bound=bound)


def _bailing_hybrid(s: _Settings) -> config.KimiDeltaAttentionConfig:
    # Ling 2.6 has the same model type, but another layer: lightning attention with norms of groups and rotary
    # positions.
    marked = any("kda" in name or name == "short_conv_kernel_size" for name in s.named)
    third = any("V3" in name for name in s.named.get("architectures") or ())
    checks.check(
        marked or third,
        "`hf_config` must be that of Ling 3.0, with Kimi delta attention, where `model_type` is bailing_hybrid; "
        "got none of its settings, such as `kda_safe_gate`.",
    )
    for name, value in dict(group_norm_size=1, linear_silu=True, linear_attention="kda", value_norm=False).items():
        s.require(name, value)
    # The class of transformers replaces the size of heads by the size of rotary positions.
    heads, size = s.read("num_attention_heads"), s.read("head_dim")
    s.require("num_kv_heads_for_linear_attn", 0, heads)
    s.defaults = {**s.defaults, _TABLE + "num_heads": heads, _TABLE + "head_dim": size}
    bound, safe = s.read("kda_lower_bound"), s.read("kda_safe_gate")
    return _kimi(s, lower_bound=bound if safe else None)


def _mamba2(s: _Settings, names: Mapping[str, str], size: int, **more: Any) -> config.Mamba2Config:
    """Return the config of a mixer: `names` has unusual names of settings, and `more` has further fields."""
    of = lambda name: s.read(names.get(name, f"mamba_{name}"))
    s.require(names.get("activation", "hidden_act"), *_SILU)
    limit, bias = names.get("limit"), of("proj_bias")
    low, high = (s.read(limit), math.inf) if limit else s.read("time_step_limit")
    return config.Mamba2Config(
        s.read("hidden_size"), of("n_groups"), of("n_heads"), of("d_state"), size, of("d_conv"),
        s.read(names.get("eps", "rms_norm_eps")), of("conv_bias"), (float(low), float(high)),
        in_bias=bias, out_bias=s.read(names["out_bias"]) if "out_bias" in names else bias, **more,
    )  # fmt: skip


def _expanded(s: _Settings, sizes: config.Mamba2Config, expand: str, *others: str) -> config.Mamba2Config:
    """Check that a mixer has as many channels as the setting `expand`, or one of the names `others`, asks for."""
    wanted, have = int(s.read(expand, *others) * sizes.D), sizes.HV * sizes.V
    checks.check(wanted == have, f"`hf_config.{expand}` must make {have} channels, those of all heads; got {wanted}.")
    return sizes


def _head_size(s: _Settings, channels: int) -> int:
    """Return the channels of a head, which follow from `channels` if a file leaves them out."""
    size = s.read("mamba_d_head")
    return channels // s.read("mamba_n_heads") if size == "auto" else size


_MAMBA2 = dict(
    n_heads="num_heads", n_groups="n_groups", d_state="state_size", d_conv="conv_kernel", conv_bias="use_conv_bias",
    proj_bias="use_bias", eps="layer_norm_epsilon",
)  # fmt: skip


def _mamba2_alone(s: _Settings) -> config.Mamba2Config:
    # Old files have the place of the norm, which no version of transformers reads.
    s.ignore("time_step_min", "norm_before_gate")
    s.require("rms_norm", True)
    return _expanded(s, _mamba2(s, _MAMBA2, s.read("head_dim")), "expand")


def _bamba(s: _Settings) -> config.Mamba2Config:
    size = _head_size(s, int(s.read("mamba_expand") * s.read("hidden_size")))
    return _expanded(s, _mamba2(s, {}, size), "mamba_expand")


def _nemotron_h(s: _Settings) -> config.Mamba2Config:
    # The layer does not read these settings, although their names suggest it.
    s.ignore("expand", "time_step_limit", "mamba_proj_bias")
    names = dict(n_heads="mamba_num_heads", d_state="ssm_state_size", activation="mamba_hidden_act")
    return _mamba2(s, _MAMBA2 | names | dict(limit="time_step_min"), s.read("mamba_head_dim"))


def _zamba2(s: _Settings) -> config.Mamba2Config:
    # This activation is for another block, the convolution always has a bias, and the epsilon is fixed.
    s.ignore("hidden_act", "use_conv_bias", "rms_norm_eps")
    s.require("time_step_limit", [0.0, math.inf])
    bias, D, size = s.read("add_bias_linear"), s.read("hidden_size"), s.read("mamba_headdim")
    channels = int(s.read("mamba_expand", "expansion_factor") * D)
    # Old files have only the channels of a head, and the class of transformers has the number of heads.
    heads = s.read("n_mamba_heads") or (channels // size if size else 8)
    sizes = config.Mamba2Config(
        D, s.read("mamba_ngroups"), heads, s.read("mamba_d_state", "state_size"), size or channels // heads,
        s.read("mamba_d_conv", "conv_dimension"), eps=1e-5, dt_limit=(float(s.read("time_step_min")), math.inf),
        in_bias=bias, out_bias=bias,
    )  # fmt: skip
    return _expanded(s, sizes, "mamba_expand", "expansion_factor")


def _falcon_h1(s: _Settings) -> config.Mamba2Config:
    s.ignore("mamba_d_ssm", "mamba_expand")
    # Only if this is null, `mamba_expand` says how many channels there are.
    channels = s.named.get("mamba_d_ssm", s.defaults["mamba_d_ssm"])
    expanded = channels is None
    if expanded:
        channels = int(s.read("mamba_expand") * s.read("hidden_size"))
    before = "before" if s.read("mamba_norm_before_gate") else "after"
    sizes = _mamba2(
        s, dict(out_bias="projectors_bias"), _head_size(s, channels), norm=before if s.read("mamba_rms_norm") else None,
        in_multiplier=float(s.read("ssm_in_multiplier")), multipliers=tuple(map(float, s.read("ssm_multipliers"))),
    )  # fmt: skip
    if expanded:
        return _expanded(s, sizes, "mamba_expand")
    have = sizes.HV * sizes.V
    checks.check(
        channels == have, f"`hf_config.mamba_d_ssm` must be one of {(have,)} for this layer; got {channels!r}."
    )
    return sizes


def _minimax(s: _Settings, layer: Any) -> config.LightningAttentionConfig:
    checks.check(layer is not None, "`layer` must be the number of the layer, which its decay depends on; got None.")
    s.require("hidden_act", *_SILU)
    # The epsilon of the layer's norm is not the epsilon of the model.
    s.ignore("rms_norm_eps")
    D, heads = s.read("hidden_size"), s.read("num_attention_heads")
    size = s.read("head_dim") or D // heads
    return config.LightningAttentionConfig(
        D, heads, heads, size, size, layer=layer, layers=s.read("num_hidden_layers")
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
_GLM = {"hidden_size": 4096, _TABLE + "num_heads": 64}
_MIXER = dict(
    hidden_size=4096, rms_norm_eps=1e-5, mamba_n_heads=128, mamba_d_head="auto", mamba_n_groups=1, mamba_d_state=256,
    mamba_d_conv=4, mamba_expand=2, mamba_conv_bias=True, mamba_proj_bias=False, time_step_limit=(0.0, math.inf),
)  # fmt: skip
_STATE_SPACE = dict(
    hidden_size=4096, num_heads=128, head_dim=64, state_size=128, expand=2, conv_kernel=4, n_groups=8, use_bias=False,
    use_conv_bias=True, layer_norm_epsilon=1e-5, time_step_limit=(0.0, math.inf),
)  # fmt: skip
_NEMOTRON = dict(mamba_num_heads=128, mamba_head_dim=64, ssm_state_size=128, time_step_min=0.001)
_ZAMBA = dict(
    hidden_size=2560, n_mamba_heads=None, mamba_headdim=None, mamba_d_state=64, mamba_ngroups=1, mamba_d_conv=4,
    mamba_expand=2, add_bias_linear=False, time_step_min=0.001,
)  # fmt: skip
_FALCON = dict(
    mamba_d_ssm=1024, mamba_norm_before_gate=True, mamba_rms_norm=False, projectors_bias=False, ssm_in_multiplier=1.0,
    ssm_multipliers=(1.0,) * 5,
)  # fmt: skip
_MINIMAX = dict(hidden_size=4096, num_attention_heads=32, num_hidden_layers=32, head_dim=None)
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
}
# Names under which models are published, with the name in `_MODELS`.
_PUBLISHED = dict(
    kimi_k3="kimi_linear", bailing_moe_v3="bailing_hybrid", bailing_moe_v3_vl="bailing_hybrid",
    minimax_text_01="minimax", minimax_m1="minimax",
)  # fmt: skip


def _text(named: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the settings of the text of a model, with a model type, which may be the type of the whole model."""
    for name in _TEXTS:
        if named.get(name) and isinstance(named[name], Mapping):
            return _text({"model_type": named.get("model_type"), **named[name]})
    return named


def config_from(hf_config: Any, layer: int | None = None) -> config.LayerConfig:
    """Return the config of the linear attention of a model.

    A setting that `hf_config` leaves out, or has as null, is the default of transformers. Names that have nothing to do
    with linear attention, such as names that a fine-tune or a quantization adds, are not read.

    Args:
      hf_config: the content of a model's config.json, as published or as transformers saves it; or a config of
        transformers, or the result of its `to_dict()`. For a model that also reads pictures, the whole config or the
        config of its text.
      layer: number of the layer, from 0, which only MiniMax needs.

    Raises:
      ValueError: no layer here serves the model, or the model has a setting of linear attention that this function does
        not know or that the layer cannot do. The message names it.
    """
    named = hf_config.to_dict() if hasattr(hf_config, "to_dict") else hf_config
    checks.check(
        isinstance(named, Mapping), f"`hf_config` must be a config of transformers; got {type(hf_config).__name__}."
    )
    named = _text(named)
    kind: Any = named.get("model_type")
    name = _PUBLISHED.get(kind, kind)
    name = f"{name}_text" if f"{name}_text" in _MODELS else name
    known = sorted({*_MODELS, *_PUBLISHED})
    checks.check(name in _MODELS, f"`hf_config.model_type` must be one of {known}; got {kind!r}.")
    make, defaults = _MODELS[name]
    settings = _Settings(named, defaults)
    found = make(settings, layer) if name == "minimax" else make(settings)
    settings.end()
    return found
