"""Every ValueError, by its text; the arguments are shapes only, so nothing can have been computed."""

import re

import jax.numpy as jnp
import pytest

from chunkwise.norm_gated import Config, rms_norm_gated
from chunkwise.shared.testing.inputs import spec

GOOD = dict(x=spec(2, 8, 4, 16), z=spec(2, 8, 4, 16), weight=spec(16))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (dict(x=1.0), "`x` must be an array [..., D]; got float."),
        (dict(x=spec()), "`x` must have shape [..., D]; got ()."),
        (dict(x=spec(2, 0)), "`x` must not be empty; got (2, 0)."),
        (dict(x=spec(2, 8, 4, 16, dtype=jnp.int32)), "`x` must be float32, bfloat16 or float16; got int32."),
        (dict(z=spec(2, 8, 64)), "`z` must have the shape of `x` (2, 8, 4, 16); got (2, 8, 64)."),
        (dict(weight=spec(64)), "`weight` must have shape [D] = (16); got (64,)."),
        (dict(weight=spec(16, 4)), "`weight` must have shape [H, D] = (4, 16); got (16, 4)."),
        (dict(activation="gelu"), "`activation` must be one of ('silu', 'sigmoid', None); got 'gelu'."),
        (dict(norm_before_gate=1), "`norm_before_gate` must be True or False, known when the program is built; got 1."),
        (dict(config=1), "`config` must be None or a chunkwise.norm_gated.Config; got 1."),
        (dict(config=Config(16, 3, 16)), "a divisor of 4 groups; got Config(rows=16, groups=3, strip=16)."),
        (dict(eps=-1.0), "`eps` must be a number, at least 0; got -1.0."),
        (dict(eps=jnp.float32(1e-6)),
         "`eps` must be a number, at least 0, known when the program is built; got an array float32 ()."),
    ],
)  # fmt: skip
def test_value_error(wrong, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        rms_norm_gated(**GOOD | wrong)
