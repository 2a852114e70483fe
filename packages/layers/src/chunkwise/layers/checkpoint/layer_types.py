"""Which layers of a model have linear attention, in the forms that files have for it."""

from collections.abc import Callable, Mapping
from typing import Any

from chunkwise.layers.checkpoint import settings
from chunkwise.shared.call import checks

# The names of layers with linear attention, alone or beside attention.
_LINEAR = ("linear_attention", "mamba", "hybrid", "M", "lightning-attn", "lightning", 0)
_LISTS = ("layer_types", "layers_block_type", "hybrid_override_pattern", "attn_type_list", "mixer_types")
# Whether layer i of a model has linear attention, if its file does not say it, by the defaults of transformers. Every
# file of MiniMax and of Nemotron says it.
_DEFAULTS: dict[str, Callable[[int], bool]] = dict(
    lara_mini=lambda i: i % 5 in (0, 2), olmo_hybrid=lambda i: i % 4 != 3, kimi_linear=lambda i: i == 0 or i % 4 != 0,
    glm5_next_text=lambda i: i % 4 != 3,
)  # fmt: skip
# Models of flash-linear-attention, whose setting `attn` names the layers with attention.
_FLA = ("gla", "comba", "gdn2", "gated_deltanet", "kda", "delta_net", "gated_deltaproduct", "rwkv7")
# Settings that say it, with their values in transformers, and the models that read them.
_INTERVALS = dict(
    qwen3_next=("full_attention_interval", 4), qwen3_5_text=("full_attention_interval", 4),
    qwen3_5_moe_text=("full_attention_interval", 4), qwen4_exp_text=("full_attention_interval", 4),
    bailing_hybrid=("layer_group_size", 6), bailing_moe_linear=("layer_group_size", 5),
)  # fmt: skip


def _listed(s: settings.Settings, name: str) -> Any:
    """Return a list of a file, or a word whose letters are a list; None if there is none."""
    found = s.named.get(name)
    valid = found is None or isinstance(found, list | tuple | str)
    checks.check(valid, f"`hf_config.{name}` must be a list; got {settings.shown(found)}.")
    return found


def _types(s: settings.Settings) -> tuple[bool, ...] | None:
    """Return of every layer whether it has linear attention, if the file has a list of layers."""
    lists = [found for name in _LISTS if (found := _listed(s, name)) is not None]
    if not lists:
        return None
    # In a list of numbers True is no 1.
    return tuple(any(type(each) is type(word) and each == word for word in _LINEAR) for each in lists[0])


def _rule(s: settings.Settings, model: str) -> Callable[[int], bool]:
    """Return the function that says whether a layer has linear attention."""
    kda, attention = (_listed(s, name) for name in (settings.TABLE + "kda_layers", "attn_layer_indices"))
    if model == "kimi_linear" and kda is not None:
        # These numbers begin with 1.
        return lambda i: i + 1 in kda
    if model == "bamba":
        return lambda i: i not in (attention or ())
    if model in _FLA:
        specs = s.named.get("attn") or ()
        specs = (specs,) if isinstance(specs, Mapping) else specs
        tables = isinstance(specs, list | tuple) and all(isinstance(x, Mapping) for x in specs)
        tables = tables and all(isinstance(x.get("layers"), list | tuple) for x in specs)
        rule = "`hf_config.attn` must be a table with a list `layers`, or a list of such tables"
        checks.check(tables, f"{rule}; got {settings.shown(s.named.get('attn'))}.")
        return lambda i: all(i not in x["layers"] for x in specs)
    if model in _INTERVALS:
        name, known = _INTERVALS[model]
        period = s.whole(name) if s.has(name) else known
        # The layers after the last whole group of Ling 2.x have attention, too.
        whole = s.whole("num_hidden_layers") // period * period if model == "bailing_moe_linear" else None
        return lambda i: (i + 1) % period != 0 and (whole is None or i < whole)
    return _DEFAULTS.get(model, lambda i: True)


def given(layer: int | None, why: str) -> int:
    """Return the number of a layer, which a model needs; `why` ends the error."""
    checks.check(layer is not None, f"`layer` must be the number of the layer, {why}; got None.")
    assert layer is not None
    return layer


def check_layer(s: settings.Settings, model: str, layer: int | None) -> None:
    """Check that a layer of a model has linear attention, or that the model has such a layer, if `layer` is None."""
    types, rule = _types(s), _rule(s, model)
    if layer is None:
        checks.check(types is None or any(types), "`hf_config` must have a layer of linear attention; got none.")
        return
    whole = (layer == 0 and not isinstance(layer, bool)) or settings.is_size(layer)
    checks.check(whole, f"`layer` must be a whole number from 0 on; got {settings.shown(layer)}.")
    count = s.whole("num_hidden_layers") if types is None and s.has("num_hidden_layers") else None
    count = count if types is None else len(types)
    checks.check(
        count is None or layer < count, f"`layer` must be below {count}, the layers of the model; got {layer}."
    )
    linear = rule(layer) if types is None else types[layer]
    checks.check(linear, f"`layer` must be the number of a layer with linear attention; got {layer}, which has none.")
