"""Every ValueError, by its text; the arguments are shapes only, so nothing can have been computed."""

import re

import jax.numpy as jnp
import pytest

from chunkwise.chunk_o import chunk_fwd_o
from chunkwise.shared.testing.inputs import spec

GOOD = dict(q=spec(2, 64, 2, 8), k=spec(2, 64, 2, 8), v=spec(2, 64, 4, 6), h=spec(2, 1, 4, 8, 6))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (dict(k=spec(2, 64, 8)), "`k` must have shape [B, T, H, K]; got (2, 64, 8)."),
        (dict(q=spec(2, 64, 4, 8)), "`q` must have shape [B, T, H, K] = (2, 64, 2, 8); got (2, 64, 4, 8)."),
        (dict(q=spec(2, 64, 2, 8, dtype=jnp.int32)), "`q` must be float32, bfloat16 or float16; got int32."),
        (dict(v=spec(2, 63, 4, 6)), "`v` must have shape [B, T, HV, V] = (2, 64, any, any); got (2, 63, 4, 6)."),
        (dict(v=spec(2, 64, 3, 6)), "`v` must have a multiple of the heads of `k`; got 3 value heads for 2 key heads."),
        (dict(h=spec(2, 2, 4, 8, 6)), "`h` must have shape [B, NT, HV, K, V] = (2, 1, 4, 8, 6); got (2, 2, 4, 8, 6)."),
        (dict(g_cum=spec(2, 64, 2)), "`g_cum` must have shape [B, T, HV] = (2, 64, 4); got (2, 64, 2)."),
        (dict(g_gamma=spec(2)), "`g_gamma` must have shape [HV] = (4); got (2,)."),
        (dict(scale=jnp.ones(6)), "`scale` must be None, a number or a scalar array; got "),
    ],
)
def test_value_error(wrong, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        chunk_fwd_o(**GOOD | wrong)
