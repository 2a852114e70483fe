"""The frequencies of rotary positions, from the settings of a model."""

import math
from collections.abc import Mapping

import numpy as np

from chunkwise.layers.checkpoint import settings
from chunkwise.shared.call import checks

# The kinds of scaling; the others of transformers depend on how long a text is.
_KINDS = ("default", "linear", "yarn")


def frequencies(s: settings.Settings, size: int) -> tuple[tuple[float, ...], float]:
    """Return the frequencies of a head of this size, radians a token, and what the turned channels are multiplied by.

    They are those of transformers. The settings are in the table `rope_parameters`, or, in older files, beside the
    table `rope_scaling`.
    """
    named = dict(s.named)
    for name in ("rope_scaling", "rope_parameters"):
        own = s.named.get(name) or {}
        checks.check(
            isinstance(own, Mapping), f"`hf_config.{name}` must be a table of settings; got {settings.shown(own)}."
        )
        named |= own
    table = settings.Settings(named, _DEFAULTS | dict(s.defaults))
    kind = table.word("rope_type", "type")
    checks.check(kind in _KINDS, f"`hf_config.rope_type` must be one of {_KINDS} for this layer; got {kind!r}.")
    theta, channels = table.number("rope_theta"), int(size * table.number("partial_rotary_factor"))
    checks.check(theta > 1, f"`hf_config.rope_theta` must be above 1; got {theta}.")
    even = channels % 2 == 0 and 0 < channels <= size
    checks.check(
        even, f"`hf_config.partial_rotary_factor` must make an even number of {size} channels; got {channels}."
    )
    s.require("rotary_dim", channels)
    plain = tuple(theta ** (-c / channels) for c in range(0, channels, 2))
    if kind == "default":
        return plain, 1.0
    factor = table.number("factor")
    whole = factor is not None and factor >= 1
    checks.check(whole, f"`hf_config.rope_scaling.factor` must be at least 1; got {factor}.")
    if kind == "linear":
        return tuple(x / factor for x in plain), 1.0
    kept = _kept(table, theta, channels)
    scaled = (float(x * (share + (1 - share) / factor)) for x, share in zip(plain, kept, strict=True))
    return tuple(scaled), _attention_factor(table, factor)


def _kept(table: settings.Settings, theta: float, channels: int) -> np.ndarray:
    """Return how much of each frequency YaRN keeps, from 1 for fast ones to 0 for slow ones."""
    length = table.whole("original_max_position_embeddings") or table.whole("max_position_embeddings")
    # Which frequency turns so many times over the length.
    place = lambda turns: channels * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(theta))
    low, high = place(table.number("beta_fast")), place(table.number("beta_slow"))
    if table.flag("truncate"):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, channels - 1)
    high = high + 0.001 if low == high else high
    return 1 - np.clip((np.arange(channels // 2) - low) / (high - low), 0, 1)


def _attention_factor(table: settings.Settings, factor: float) -> float:
    """Return what YaRN multiplies the turned channels by."""
    if (given := table.number("attention_factor")) is not None:
        return given
    scale = lambda m: 0.1 * m * math.log(factor) + 1.0
    m, over = table.number("mscale"), table.number("mscale_all_dim")
    return scale(m) / scale(over) if m and over else scale(1.0)


_DEFAULTS = dict(
    rope_type="default", partial_rotary_factor=1.0, factor=None, original_max_position_embeddings=None, beta_fast=32.0,
    beta_slow=1.0, truncate=True, attention_factor=None, mscale=None, mscale_all_dim=None,
)  # fmt: skip
