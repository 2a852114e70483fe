"""Settings of models that no file should have, and what must come of them."""

import contextlib
import dataclasses
import math
import random

from chunkwise.layers import config_from


def nested(depth: int, key: str | None = None):
    value = 1
    for _ in range(depth):
        value = [value] if key is None else {key: value}
    return value


# What a setting never is, and what only some settings are.
HOSTILE = [
    "false", "x", "", "1e-6", [], {}, [[1]], {"a": 1}, nested(3000), nested(3000, "text_config"), 10**400, -(10**400),
    math.nan, -math.inf, True, 0, -1, 1.5, b"1", {"__float__": "x"}, {"__float__": [1]}, ["nan"] * 5, [math.nan] * 5,
    [None, None], (0.0,), object(),
]  # fmt: skip


def assert_sound(own: dict, expected, tables=()) -> None:
    """Fail unless settings of which one, or three, are hostile make a ValueError or a config of right types."""
    draw, names = random.Random(0), [*own, *tables]
    changes = [{name: value} for name in names for value in HOSTILE]
    changes += [{each: draw.choice(HOSTILE) for each in draw.sample(names, 3)} for _ in range(100)]
    for change in changes:
        with contextlib.suppress(ValueError):
            assert is_sound(config_from(own | change, layer=2), expected), change


def is_sound(made, expected) -> bool:
    """Return whether all sizes of a config are of the types that they should have, and no number is infinite or NaN."""
    plain = lambda x: x if isinstance(x, tuple) else (x,)
    for field in dataclasses.fields(expected):
        value, known = getattr(made, field.name), getattr(expected, field.name)
        finite = all(not isinstance(x, float) or math.isfinite(x) for x in plain(value)) or field.name == "dt_limit"
        if not finite or (value is not None and known is not None and type(value) is not type(known)):
            return False
    return True
