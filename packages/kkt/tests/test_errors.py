"""Every ValueError, by its text; the arguments are shapes only, so nothing can have been computed."""

import re

import jax.numpy as jnp
import pytest

from chunkwise.kkt import chunk_scaled_dot_kkt
from chunkwise.shared.testing.inputs import spec

GOOD = dict(k=spec(2, 64, 2, 8), beta=spec(2, 64, 4), g_cum=spec(2, 64, 4))
ONE = dict(k=spec(1, 64, 2, 8), beta=spec(1, 64, 4), g_cum=spec(1, 64, 4))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (dict(k=[1.0]), "`k` must be an array [B, T, H, K]; got list."),
        (dict(k=spec(2, 64, 8)), "`k` must have shape [B, T, H, K]; got (2, 64, 8)."),
        (dict(k=spec(2, 0, 2, 8)), "`k` must not be empty; got (2, 0, 2, 8)."),
        (dict(k=spec(2, 64, 2, 8, dtype=jnp.int32)), "`k` must be float32, bfloat16 or float16; got int32."),
        (dict(beta=spec(2, 63, 4)), "`beta` must have shape [B, T, HV] = (2, 64, any); got (2, 63, 4)."),
        (
            dict(beta=spec(2, 64, 3)),
            "`beta` must have a multiple of the heads of `k`; got 3 value heads for 2 key heads.",
        ),
        (dict(g_cum=spec(2, 64, 2)), "`g_cum` must have shape [B, T, HV] = (2, 64, 4); got (2, 64, 2)."),
    ],
)
def test_value_error(wrong, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        chunk_scaled_dot_kkt(**GOOD | wrong)
