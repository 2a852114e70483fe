"""Wrong arguments raise an error in the words of the function that was called, before anything is computed."""

import re

import jax.numpy as jnp
import numpy as np
import pytest

from chunkwise.dplr import chunk_dplr_delta_rule, chunk_rwkv7, recurrent_dplr_delta_rule
from chunkwise.shared.testing.inputs import spec

KEY = spec(1, 4, 1, 8)
X = dict(q=KEY, k=KEY, v=spec(1, 4, 2, 8), a=KEY, b=KEY, gk=spec(1, 4, 2, 8))
RWKV = {{"q": "r", "gk": "w"}.get(name, name): y for name, y in X.items()}
WRONG = [
    (dict(a=spec(1, 8, 1, 8)), "`a` must have shape [B, T, H, K] = (1, 4, 1, 8); got (1, 8, 1, 8)."),
    (dict(b=spec(1, 4, 2, 8)), "`b` must have shape [B, T, H, K] = (1, 4, 1, 8); got (1, 4, 2, 8)."),
    (dict(gk=spec(1, 4, 2)), "`gk` must have shape [B, T, HV, K]; got (1, 4, 2)."),
    (dict(v=spec(1, 8, 2, 8)), "`v` must have shape [B, T, HV, V] = (1, 4, any, any); got (1, 8, 2, 8)."),
]


@pytest.mark.parametrize(("wrong", "message"), WRONG)
@pytest.mark.parametrize("function", [chunk_dplr_delta_rule, recurrent_dplr_delta_rule])
def test_errors(function, wrong, message):
    x = {
        name: y if isinstance(y, int | float | np.ndarray) else jnp.zeros(y.shape, y.dtype)
        for name, y in (X | wrong).items()
    }
    with pytest.raises(ValueError, match=re.escape(message)):
        function(**x)


@pytest.mark.parametrize(("name", "label"), [("r", "B, T, H, K"), ("w", "B, T, HV, K")])
def test_errors_of_rwkv7_have_its_names(name, label):
    with pytest.raises(ValueError, match=re.escape(f"`{name}` must have shape [{label}]; got (1, 4).")):
        chunk_rwkv7(**RWKV | {name: spec(1, 4)})
