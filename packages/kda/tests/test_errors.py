"""What the gated delta rule has no errors of; the arguments are shapes only, so nothing can have been computed."""

import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from chunkwise.kda import Config, chunk_kda, recurrent_kda
from chunkwise.shared.testing.inputs import spec

GOOD = dict(q=spec(2, 64, 2, 8), k=spec(2, 64, 2, 8), v=spec(2, 64, 4, 6), g=spec(2, 64, 4, 8), beta=spec(2, 64, 4))

WRONG = [
    (dict(g=spec(2, 64, 4)), "`g` must have shape [B, T, HV, K]; got (2, 64, 4)."),
    (dict(g=spec(2, 64, 2, 8)), "`g` must have shape [B, T, HV, K] = (2, 64, 4, 8); got (2, 64, 2, 8)."),
    *(
        (dict(min_gate=x), f"`min_gate` must be None or a number <= 0; got {x!r}.")
        for x in (1.0, np.float32(0.5), math.nan, True, "-5")
    ),
    (
        dict(min_gate=jnp.float32(-5.0)),
        "`min_gate` must be None or a number <= 0, known when the program is built; got an array float32 ().",
    ),
]


@pytest.mark.parametrize("operator", [chunk_kda, recurrent_kda])
@pytest.mark.parametrize(("wrong", "message"), WRONG)
def test_value_error(wrong, message, operator):
    with pytest.raises(ValueError, match=re.escape(message)):
        operator(**GOOD | wrong)


@pytest.mark.parametrize(
    "bound", [None, 0, -5, -5.0, -math.inf, np.float32(-5.0), np.int64(-5), np.float16(-5.0)], ids=repr
)
def test_any_number_is_a_least_gate(bound):
    o, _ = jax.eval_shape(lambda x: chunk_kda(**x, min_gate=bound), GOOD)
    assert o.shape == GOOD["v"].shape


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            Config(2, 6),
            "`config.heads` must divide 6 value heads in whole groups of 3 or inside of one, and with K = 16 and V = "
            "16 in multiples of 128 channels or all heads; got 2.",
        ),
        (Config(6, 4), "`config.heads_bwd` must divide 6 value heads in whole groups of 3 or inside of one, and with"),
        (Config(0, 3), "`config.heads` must be a whole number above 0; got 0."),
    ],
)
def test_config(config, message):
    x = GOOD | dict(v=spec(2, 64, 6, 6), g=spec(2, 64, 6, 8), beta=spec(2, 64, 6))
    with pytest.raises(ValueError, match=re.escape(message)):
        jax.eval_shape(lambda x: chunk_kda(**x, implementation="fused", config=config), x)


def test_what_one_implementation_lacks():
    wide = GOOD | dict(v=spec(2, 64, 4, 300))
    with pytest.raises(NotImplementedError, match='"fused" takes K and V up to 256; got 8 and 300'):
        jax.eval_shape(lambda x: chunk_kda(**x, implementation="fused"), wide)
    with pytest.raises(NotImplementedError, match="takes a few tokens per sequence"):
        recurrent_kda(**{name: spec(1, 40000, *x.shape[2:]) for name, x in GOOD.items()}, implementation="fused")
