"""The configs of layers from the settings of flash-linear-attention's models, and from the files of RWKV-7."""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from chunkwise.layers import config
from chunkwise.layers.checkpoint import layer_types, settings
from chunkwise.shared.call import checks

# The defaults of flash-linear-attention for settings that a file leaves out.
PRODUCT = dict(
    hidden_size=2048, num_heads=6, head_dim=256, expand_v=2.0, conv_size=4, norm_eps=1e-6, use_forget_gate=False,
    allow_neg_eigval=False, num_householder=1, use_output_gate=True,
)  # fmt: skip
DELTA_NET = dict(
    hidden_size=2048, num_heads=16, expand_k=1.0, expand_v=1.0, conv_size=4, norm_eps=1e-6, allow_neg_eigval=False,
    use_gate=False,
)  # fmt: skip
GLA = dict(
    hidden_size=2048, num_heads=4, expand_k=0.5, expand_v=1.0, norm_eps=1e-6, gate_low_rank_dim=16,
    gate_logit_normalizer=16.0,
)  # fmt: skip
GROUPED = dict(
    hidden_size=2048, num_heads=6, num_v_heads=None, head_dim=256, expand_v=2.0, conv_size=4, norm_eps=1e-6,
    allow_neg_eigval=False, output_gate_activation="swish", lower_bound=None,
)  # fmt: skip
COMBA = GROUPED | dict(use_output_gate=True)
GDN2 = GROUPED | dict(num_heads=16, head_dim=128, expand_v=1.0, norm_eps=1e-5)
MAMBA2 = dict(
    hidden_size=2048, head_dim=64, state_size=128, expand=2, conv_kernel=4, n_groups=1, use_bias=False,
    use_conv_bias=True, norm_eps=1e-5, dt_limit=(0.0, math.inf), rmsnorm=True, norm_before_gate=False,
)  # fmt: skip
RWKV7 = dict(
    hidden_size=2048, head_dim=64, num_heads=None, decay_low_rank_dim=64, a_low_rank_dim=64, gate_low_rank_dim=128,
    v_low_rank_dim=16, norm_eps=1e-5,
)  # fmt: skip
# The same for files of the RWKV-7 of transformers, which `architectures` tells apart.
_TRANSFORMERS = RWKV7 | dict(hidden_size=768, v_low_rank_dim=32)
# The files of RWKV-7 have no config; the letters of their projections of low rank, and the shapes of their arrays.
_RANKS = dict(w="R_decay", a="R_rate", g="R_gate", v="R_first")
# The starts of the names of blocks in these files, and where transformers has them.
_BLOCKS = ("blocks.", "rwkv7.blocks.")
# Why a layer of RWKV-7 has a number.
_WHY = "because the first one takes no values of another"


def _expanded(s: settings.Settings, name: str, channels: int, heads: int = 1) -> int:
    """Return the channels of each head that a factor makes of some channels."""
    expand = s.number(name)
    size = int(channels * expand) // heads
    whole = size > 0 and channels * expand == size * heads
    parts = f"of {channels}" if heads == 1 else f"of {channels} for {heads} heads"
    checks.check(whole, f"`hf_config.{name}` must make whole channels {parts}; got {expand}.")
    return size


def gated_deltaproduct(s: settings.Settings) -> config.GatedDeltaProductConfig:
    """Return the config of Gated DeltaProduct."""
    s.require_each(use_short_conv=True, conv_bias=False)
    H, K = s.whole("num_heads"), s.whole("head_dim")
    return config.GatedDeltaProductConfig(
        s.whole("hidden_size"), H, H, K, _expanded(s, "expand_v", K), s.whole("conv_size"), s.number("norm_eps"),
        s.whole("num_householder"), s.flag("use_forget_gate"), s.flag("allow_neg_eigval"), s.flag("use_output_gate"),
    )  # fmt: skip


def delta_net(s: settings.Settings) -> config.GatedDeltaProductConfig:
    """Return the config of DeltaNet: one step of the delta rule a token, and no decay."""
    s.require_each(use_short_conv=True, use_beta=True, use_output_norm=True, qk_norm="l2", qk_activation="silu")
    D, H = s.whole("hidden_size"), s.whole("num_heads")
    return config.GatedDeltaProductConfig(
        D, H, H, _expanded(s, "expand_k", D, H), _expanded(s, "expand_v", D, H), s.whole("conv_size"),
        s.number("norm_eps"), num_householder=1, forget_gate=False, allow_neg_eigval=s.flag("allow_neg_eigval"),
        output_gate=s.flag("use_gate"),
    )  # fmt: skip


def _grouped(s: settings.Settings) -> dict[str, Any]:
    """Return the sizes of a layer whose value heads may share a key head, by name."""
    H, K = s.whole("num_heads"), s.whole("head_dim")
    return dict(
        D=s.whole("hidden_size"), H=H, HV=s.whole("num_v_heads") or H, K=K, V=_expanded(s, "expand_v", K),
        W=s.whole("conv_size"), eps=s.number("norm_eps"), allow_neg_eigval=s.flag("allow_neg_eigval"),
    )  # fmt: skip


def gated_deltanet(s: settings.Settings) -> config.GatedDeltaNetConfig:
    """Return the config of a gated DeltaNet."""
    s.require_each(use_short_conv=True, use_gate=True)
    gate = s.word("output_gate_activation")
    return config.GatedDeltaNetConfig(**_grouped(s), activation="silu" if gate == "swish" else gate)


def kda(s: settings.Settings) -> config.KimiDeltaAttentionConfig:
    """Return the config of Kimi delta attention."""
    s.require("use_short_conv", True)
    sizes, bound = _grouped(s), s.number("lower_bound")
    # It only lets a kernel rely on the bound.
    s.require("safe_gate", False, bound is not None)
    return config.KimiDeltaAttentionConfig(**sizes, R=sizes["V"], lower_bound=bound, gate_bias=True)


def comba(s: settings.Settings) -> config.CombaConfig:
    """Return the config of Comba."""
    # The block there reads none of these but the first two, and has the parts that the others name.
    s.require_each(use_short_conv=True, use_output_correction=True, use_inner_decay=True, allow_neg_eigval=False)
    s.ignore("correction_factor")
    sizes = _grouped(s)
    del sizes["allow_neg_eigval"]
    return config.CombaConfig(**sizes, output_gate=s.flag("use_output_gate"))


def gdn2(s: settings.Settings) -> config.GatedDeltaNet2Config:
    """Return the config of Gated DeltaNet 2."""
    s.require_each(use_short_conv=True, conv_bias=False)
    return config.GatedDeltaNet2Config(**_grouped(s))


def is_mamba2(named: Mapping[str, Any]) -> bool:
    """Return whether settings of the type mamba2 are of flash-linear-attention, and not of transformers."""
    return any(name in named for name in ("rmsnorm", "D_has_hdim", "norm_eps", "dt_limit", "fuse_cross_entropy"))


def mamba2(s: settings.Settings) -> config.Mamba2Config:
    """Return the config of the mixer of Mamba-2."""
    s.ignore("dt_min", "dt_max", "dt_init_floor", "conv_init")
    s.require("D_has_hdim", False)
    s.require("hidden_act", "silu", "swish")
    D, V, bias = s.whole("hidden_size"), s.whole("head_dim"), s.flag("use_bias")
    channels = _expanded(s, "expand", D)
    HV = channels // V
    checks.check(channels == HV * V, f"`hf_config.head_dim` must divide {channels} channels; got {V}.")
    s.require("num_heads", HV)
    before = "before" if s.flag("norm_before_gate") else "after"
    norm = before if s.flag("rmsnorm") else None
    return config.Mamba2Config(
        D, s.whole("n_groups"), HV, s.whole("state_size"), V, s.whole("conv_kernel"), s.number("norm_eps"),
        s.flag("use_conv_bias"), s.limit("dt_limit"), norm, in_bias=bias, out_bias=bias,
    )  # fmt: skip


def gla(s: settings.Settings) -> config.GatedLinearAttentionConfig:
    """Return the config of gated linear attention."""
    s.require_each(use_short_conv=False, use_output_gate=True, elementwise_affine=True, use_gk=True, use_gv=False)
    s.ignore("conv_size")
    D, H = s.whole("hidden_size"), s.whole("num_heads")
    s.require("num_kv_heads", H)
    # The activation of the norm's gate, too.
    s.require("hidden_act", "swish", "silu")
    for name in ("feature_map", "clamp_min"):
        s.require(name)
    return config.GatedLinearAttentionConfig(
        D, H, H, _expanded(s, "expand_k", D, H), _expanded(s, "expand_v", D, H), eps=s.number("norm_eps"),
        R=s.whole("gate_low_rank_dim"), normalizer=s.number("gate_logit_normalizer"),
    )  # fmt: skip


def rwkv7(s: settings.Settings, layer: int | None) -> config.Rwkv7AttentionConfig:
    """Return the config of a layer of RWKV-7, of its number."""
    layer = layer_types.given(layer, _WHY)
    if s.named.get("architectures") == ["Rwkv7ForCausalLM"]:
        s.defaults = _TRANSFORMERS
    D, heads = s.whole("hidden_size"), s.whole("num_heads")
    # Their number says the size of heads only where the size is null, and not missing. Else it is not read, and some
    # files have a wrong one.
    by_number = heads is not None and s.is_null("head_dim")
    K = D // heads if by_number else s.whole("head_dim", "head_size")
    H = D // K if K else 0
    checks.check(H > 0 and H * K == D, f"`hf_config.hidden_size` must be a multiple of the heads' size {K}; got {D}.")
    values = _value_channels(s, layer) or D
    checks.check(values % H == 0, f"`hf_config.value_dim` must be a multiple of {H} heads; got {values}.")

    def rank(name: str, factor: float) -> int:
        return max(32, round(factor * math.sqrt(D) / 32) * 32) if s.is_null(name) else s.whole(name)

    wide = K / 64
    return config.Rwkv7AttentionConfig(
        D, H, H, K, values // H, eps=K * s.number("norm_eps"), R_decay=rank("decay_low_rank_dim", 2.5 * wide),
        R_rate=rank("a_low_rank_dim", 2.5 * wide), R_gate=rank("gate_low_rank_dim", 5),
        R_first=rank("v_low_rank_dim", 1.7 * wide) if layer else None,
    )  # fmt: skip


def _value_channels(s: settings.Settings, layer: int) -> int | None:
    """Return the channels of the values of a layer, which a file has for all layers or for each; None for none."""
    found = s.named.get("value_dim")
    listed = isinstance(found, list | tuple) and layer < len(found)
    value = found[layer] if listed else found
    rule = "`hf_config.value_dim` must be a whole number above 0, or one for each layer"
    checks.check(value is None or settings.is_size(value), f"{rule}; got {settings.shown(found)}.")
    return value


def is_released(named: Mapping[str, Any]) -> bool:
    """Return whether a mapping has the arrays of a released file of RWKV, and not settings."""
    return _start(named) is not None


def _start(named: Mapping[str, Any]) -> str | None:
    """Return the start of the names of blocks of RWKV-7 in a mapping; None if it has none."""
    starts = {start for start in _BLOCKS for name in named if isinstance(name, str) and name.startswith(f"{start}0.")}
    return min(starts, default=None)


def released(named: Mapping[str, Any], layer: int | None) -> config.Rwkv7AttentionConfig:
    """Return the config of a layer of a released file of RWKV-7, from the shapes of its arrays."""
    layer = layer_types.given(layer, _WHY)
    whole = checks.is_whole(layer) and layer >= 0
    checks.check(whole, f"`layer` must be a whole number from 0 on; got {settings.shown(layer)}.")

    start = _start(named)

    def shape(name: str) -> tuple[int, int]:
        full = f"{start}{layer}.att.{name}"
        there = full in named
        found: tuple[int, ...] = np.shape(named[full]) if there else ()
        rule = f"`hf_config` must have {full!r} of two dimensions, as files of RWKV-7 have it"
        checks.check(len(found) == 2, f"{rule}; got {found if there else 'no such name'}.")
        rows, columns = found
        return rows, columns

    (H, K), D = shape("r_k"), shape("w1")[0]
    ranks = {rank: shape(f"{letter}1")[1] for letter, rank in _RANKS.items() if layer or letter != "v"}
    return config.Rwkv7AttentionConfig(D, H, H, K, K, **ranks)
