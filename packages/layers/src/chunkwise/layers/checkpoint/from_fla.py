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
    allow_neg_eigval=False, num_householder=1,
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


def gated_deltaproduct(s: settings.Settings) -> config.GatedDeltaProductConfig:
    """Return the config of Gated DeltaProduct."""
    for name in ("use_short_conv", "use_output_gate"):
        s.require(name, True)
    s.require("conv_bias", False)
    H, K, expand = s.whole("num_heads"), s.whole("head_dim"), s.number("expand_v")
    V = int(K * expand)
    checks.check(V > 0 and K * expand == V, f"`hf_config.expand_v` must make whole channels of {K}; got {expand}.")
    return config.GatedDeltaProductConfig(
        s.whole("hidden_size"), H, H, K, V, s.whole("conv_size"), s.number("norm_eps"), s.whole("num_householder"),
        s.flag("use_forget_gate"), s.flag("allow_neg_eigval"),
    )  # fmt: skip


def rwkv7(s: settings.Settings, layer: int | None) -> config.Rwkv7AttentionConfig:
    """Return the config of a layer of RWKV-7, of its number."""
    layer = layer_types.given(layer, _WHY)
    if s.named.get("architectures") == ["Rwkv7ForCausalLM"]:
        s.defaults = _TRANSFORMERS
    D, heads = s.whole("hidden_size"), s.whole("num_heads")
    # Their number says the size of heads only where the size is null, and not missing. Else it is not read, and some
    # files have a wrong one.
    by_number = heads is not None and "head_dim" in s.named and not s.has("head_dim")
    K = D // heads if by_number else s.whole("head_dim", "head_size")
    H = D // K if K else 0
    checks.check(H > 0 and H * K == D, f"`hf_config.hidden_size` must be a multiple of the heads' size {K}; got {D}.")
    values = _value_channels(s, layer) or D
    checks.check(values % H == 0, f"`hf_config.value_dim` must be a multiple of {H} heads; got {values}.")

    def rank(name: str, factor: float) -> int:
        null = name in s.named and not s.has(name)
        return max(32, round(factor * math.sqrt(D) / 32) * 32) if null else s.whole(name)

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
