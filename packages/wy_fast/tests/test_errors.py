"""Every ValueError, by its text; the arguments are shapes only, so nothing can have been computed."""

import re

import jax.numpy as jnp
import pytest

from chunkwise.shared.testing.inputs import spec
from chunkwise.wy_fast import recompute_w_u

GOOD = dict(
    k=spec(2, 64, 2, 8), v=spec(2, 64, 4, 6), beta=spec(2, 64, 4), A_inv=spec(2, 64, 4, 32), g_cum=spec(2, 64, 4)
)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (dict(k=spec(2, 64, 8)), "`k` must have shape [B, T, H, K]; got (2, 64, 8)."),
        (dict(k=spec(2, 64, 2, 8, dtype=jnp.int32)), "`k` must be float32, bfloat16 or float16; got int32."),
        (dict(v=spec(2, 63, 4, 6)), "`v` must have shape [B, T, HV, V] = (2, 64, any, any); got (2, 63, 4, 6)."),
        (dict(v=spec(2, 64, 3, 6)), "`v` must have a multiple of the heads of `k`; got 3 value heads for 2 key heads."),
        (dict(beta=spec(2, 64, 2)), "`beta` must have shape [B, T, HV] = (2, 64, 4); got (2, 64, 2)."),
        (
            dict(A_inv=spec(2, 64, 2, 32)),
            "`A_inv` must have shape [B, T, HV, C] = (2, 64, 4, any); got (2, 64, 2, 32).",
        ),
        (dict(A_inv=spec(2, 64, 4, 48)), "`A_inv` must have a last dimension of one of (16, 32, 64, 128); got 48."),
        (dict(g_cum=spec(2, 64)), "`g_cum` must have shape [B, T, HV]; got (2, 64)."),
    ],
)
def test_value_error(wrong, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        recompute_w_u(**GOOD | wrong)
