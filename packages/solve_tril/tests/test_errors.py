"""Every ValueError, by its text; the arguments are shapes only, so nothing can have been computed."""

import re

import jax.numpy as jnp
import pytest

from chunkwise.shared.testing.inputs import spec
from chunkwise.solve_tril import solve_tril


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (dict(A=None), "`A` must be an array [B, T, HV, C]; got NoneType."),
        (dict(A=spec(2, 64, 64)), "`A` must have shape [B, T, HV, C]; got (2, 64, 64)."),
        (dict(A=spec(2, 64, 0, 64)), "`A` must not be empty; got (2, 64, 0, 64)."),
        (dict(A=spec(2, 64, 1, 48)), "`A` must have a last dimension of one of (16, 32, 64, 128); got 48."),
        (dict(A=spec(2, 64, 1, 64, dtype=jnp.int8)), "`A` must be float32, bfloat16 or float16; got int8."),
        (dict(A_inv=spec(2, 64, 64)), "`A_inv` must have shape [B, T, HV, C]; got (2, 64, 64)."),
        (dict(A_inv=spec(2, 64, 2, 64)), "`A_inv` must have shape [B, T, HV, C] = (2, 64, 1, 64); got (2, 64, 2, 64)."),
    ],
)
def test_value_error(wrong, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        solve_tril(**dict(A=spec(2, 64, 1, 64)) | wrong)
