"""Settings of models that no file should have, and what must come of them."""

import dataclasses
import math


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


def is_sound(made, expected) -> bool:
    """Return whether all sizes of a config are of the types that they should have, and no number is infinite or NaN."""
    plain = lambda x: x if isinstance(x, tuple) else (x,)
    for field in dataclasses.fields(expected):
        value, known = getattr(made, field.name), getattr(expected, field.name)
        finite = all(not isinstance(x, float) or math.isfinite(x) for x in plain(value)) or field.name == "dt_limit"
        if not finite or (value is not None and known is not None and type(value) is not type(known)):
            return False
    return True
