"""Every ValueError, by its text; the arguments are shapes only, so nothing can have been computed."""

import re

import jax.numpy as jnp
import pytest

from chunkwise.cumsum import chunk_local_cumsum
from chunkwise.shared.testing.inputs import spec


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (dict(g=1.0), "`g` must be an array [B, T, H]; got float."),
        (dict(g=spec(2, 64)), "`g` must have shape [B, T, H] or [B, T, H, K]; got (2, 64)."),
        (dict(g=spec(2, 64, 0)), "`g` must not be empty; got (2, 64, 0)."),
        (dict(g=spec(2, 64, 2, dtype=jnp.int32)), "`g` must be float32, bfloat16 or float16; got int32."),
        (dict(reverse="no"), "`reverse` must be True or False, known when the program is built; got 'no'."),
        (
            dict(reverse=jnp.bool_(True)),
            "`reverse` must be True or False, known when the program is built; got an array bool ().",
        ),
    ],
)
def test_value_error(wrong, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        chunk_local_cumsum(**dict(g=spec(2, 64, 2)) | wrong)
