"""The settings of a model, of checked types: from config.json, or from a config of transformers."""

import math
import re
import reprlib
from collections.abc import Mapping
from typing import Any, TypeGuard

import numpy as np

from chunkwise.layers import config
from chunkwise.shared.call import checks

# Only settings with one of these words in their name can change a layer of linear attention.
_CONCERNS = re.compile(
    r"(^|use_)linear|linear_att|mamba|kda|gdn|(^|use_)delta(_|net|$)|lightning|(^|_)ssm|(^|_)conv(_|\d|$)|time_step"
    r"|(^|_)dt_|decay|eigval|lower_bound|(norm|gate)_(before|after)|group_norm|output_gate|safe_gate|full_rank"
)
# Settings with such a word that change no layer: for the start of training, the place of states, programs, other
# layers, attention and experts.
_OTHERS = frozenset(
    """
    linear_a_log_max linear_a_log_min linear_dt_init_floor linear_dt_max linear_dt_min mamba_dt_init_floor mamba_dt_max
    mamba_dt_min time_step_floor time_step_init_scheme time_step_max time_step_min time_step_rank time_step_scale

    mamba_chunk_size use_mamba_kernels use_mambapy

    activation_situ_linear_beta attention_output_gate attn_output_gate linear_attn_alpha_factor linear_attn_beta_factor
    layernorm_linear_attention_alpha layernorm_linear_attention_beta mamba_use_mlp mla_use_output_gate mtp_use_kda
    number_of_conv_states ple_conv_kernel_size ssm_out_multiplier
    """.split()  # noqa: SIM905
)
# Parts of names that give such a word another sense: an optimizer, a loss, the generation of text, rotary positions,
# the type of states, and the convolutions of pictures, of sound and of experts.
_ELSEWHERE = re.compile(
    r"(^|_)(ema|lr|learning_rate|weight)_|(^|_)decay_(steps|epochs|ratio|type|style)|loss|penalty|rope|rotary|dtype"
    r"|dropout|initializer_range$|(^|_)conv_(stem|pos|embed|encoder|layers|stride|channel|shortcut|chunk|out_|output)"
    r"|(subsampling|sscp|nemo|conf|conformer|post|scale|vision|audio|depthwise|positionwise)_conv"
)
# The table in which Kimi and GLM have the settings of the layer.
TABLE = "linear_attn_config."
# Values that somebody wrote may be long, and nested without end.
_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = 60


def shown(value: object) -> str:
    """Return a value as an error shows it."""
    return _SHORT.repr(value)


def is_size(value: object) -> TypeGuard[int]:
    """Return whether a value is a whole number above 0, and small enough for a size."""
    return checks.is_whole(value) and 0 < value < 2**31


def _is_limit(value: object) -> bool:
    """Return whether a value is two numbers from 0 on, of which the second one may be infinite."""
    pair = isinstance(value, tuple) and len(value) == 2
    return (
        pair
        and config.is_number(value[0])
        and (config.is_number(value[1]) or value[1] == math.inf)
        and 0 <= value[0] < value[1]
    )


_KINDS = dict(
    whole=(is_size, "a whole number above 0"),
    number=(config.is_number, "a finite number"),
    flag=(lambda value: isinstance(value, bool), "true or false"),
    word=(lambda value: isinstance(value, str), "a word"),
    limit=(_is_limit, "two rising numbers from 0 on"),
    factors=(lambda value: isinstance(value, tuple) and all(map(config.is_number, value)), "a list of finite numbers"),
)


def _plain(value: object) -> Any:
    """Return a number of config.json, whose infinity is {"__float__": "Infinity"} or a word; lists become tuples."""
    if isinstance(value, Mapping) and set(value) == {"__float__"}:
        value = value["__float__"]
    if isinstance(value, str):
        return math.inf if value == "Infinity" else value
    # A number that float32 lacks is infinite, such as 1e308 in files of Nemotron-3.
    above = isinstance(value, float) and value > float(np.finfo(np.float32).max)
    return math.inf if above else value


def _entries(value: object) -> Any:
    return tuple(_plain(entry) for entry in value) if isinstance(value, list | tuple) else _plain(value)


class Settings:
    """The settings of a model. A setting whose name sounds like linear attention must be read, required, or ignored.

    Args:
      named: the settings; a setting in `linear_attn_config` has a name such as TABLE + "head_dim".
      defaults: the defaults of transformers for settings that are missing or null, by the first of their names.
    """

    def __init__(self, named: Mapping[str, Any], defaults: Mapping[str, Any]):
        name = TABLE.removesuffix(".")
        nested = named.get(name)
        is_table = nested is None or isinstance(nested, Mapping)
        checks.check(is_table, f"`hf_config.{name}` must be a table of settings; got {shown(nested)}.")
        flat = dict(named) | {f"{TABLE}{key}": value for key, value in (nested or {}).items()}
        self.named = {key: value for key, value in flat.items() if isinstance(key, str) and key != name}
        self.defaults, self.done = defaults, set()

    def has(self, name: str) -> bool:
        """Return whether there is a setting, and it is not null."""
        return self.named.get(name) is not None

    def is_null(self, name: str) -> bool:
        """Return whether a setting is null, and not missing."""
        return name in self.named and not self.has(name)

    def _value(self, kind: str, name: str) -> Any:
        value = _entries(self.named[name])
        valid, words = _KINDS[kind]
        checks.check(valid(value), f"`hf_config.{name}` must be {words}; got {shown(self.named[name])}.")
        return value

    def _read(self, kind: str, name: str, *others: str) -> Any:
        """Return a setting of a kind that may have several names, or its default."""
        self.done.update((name, *others))
        there = [each for each in (name, *others) if self.has(each)]
        if not there:
            return self.defaults[name]
        value = self._value(kind, there[0])
        for each in there[1:]:
            other = self._value(kind, each)
            rule = f"`hf_config.{each}` must be one of {(value,)} for this layer"
            checks.check(other == value, f"{rule}; got {other!r}.")
        return value

    def whole(self, name: str, *others: str) -> int:
        """Return a whole number above 0."""
        return self._read("whole", name, *others)

    def number(self, name: str, *others: str) -> Any:
        """Return a finite number, as float."""
        value = self._read("number", name, *others)
        return value if value is None else float(value)

    def flag(self, name: str, *others: str) -> bool:
        """Return True or False."""
        return self._read("flag", name, *others)

    def word(self, name: str, *others: str) -> str:
        """Return a word."""
        return self._read("word", name, *others)

    def limit(self, name: str, *others: str) -> tuple[float, float]:
        """Return two rising numbers from 0 on, of which the second one may be infinite."""
        low, high = self._read("limit", name, *others)
        return float(low), float(high)

    def factors(self, name: str) -> tuple[float, ...]:
        """Return finite numbers."""
        return tuple(map(float, self._read("factors", name)))

    def require(self, name: str, *values: object) -> None:
        """Check that a setting, if there is one, has one of these values, which are all that the layer can do."""
        self.done.add(name)
        if self.has(name):
            value = _entries(self.named[name])
            same = any(type(value) is type(each) and value == each for each in values)
            checks.check(same, f"`hf_config.{name}` must be one of {values} for this layer; got {shown(value)}.")

    def require_each(self, **values: object) -> None:
        """Check the same for a value of every one of these settings."""
        for name, value in values.items():
            self.require(name, value)

    def ignore(self, *names: str) -> None:
        """Allow settings that this model's layer does not read, although other models' layers do."""
        self.done.update(names)

    def end(self) -> None:
        """Check that every setting that may change the layer is known; one that is null changes none."""
        left = {name for name in self.named if self.has(name)} - self.done - _OTHERS
        unknown = sorted(name for name in left if _CONCERNS.search(name) and not _ELSEWHERE.search(name))
        checks.check(not unknown, f"`hf_config` must have no settings that `config_from` does not know; got {unknown}.")
