"""Every ValueError, by its text; the arguments are shapes only, so nothing can have been computed."""

import re

import jax.numpy as jnp
import pytest

from chunkwise.causal_conv1d import Config, causal_conv1d, causal_conv1d_update
from chunkwise.shared.testing import spec

GOOD = dict(x=spec(2, 8, 16), weight=spec(16, 4))
ONE = dict(x=spec(1, 8, 16))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (dict(x=[1.0]), "`x` must be an array [B, T, D]; got list."),
        (dict(x=spec(2, 16)), "`x` must have shape [B, T, D]; got (2, 16)."),
        (dict(x=spec(2, 8, 16, dtype=jnp.int32)), "`x` must be float32, bfloat16 or float16; got int32."),
        (dict(weight=spec(8, 4)), "`weight` must have shape [D, W] = (16, any); got (8, 4)."),
        (dict(weight=spec(16, 1)), "`weight` must have a width of 2 to 8; got 1."),
        (dict(weight=spec(16, 9)), "`weight` must have a width of 2 to 8; got 9."),
        (dict(bias=spec(4)), "`bias` must have shape [D] = (16); got (4,)."),
        (
            dict(initial_state=spec(2, 16, 3)),
            "`initial_state` must have shape [N, W-1, D] = (2, 3, 16); got (2, 16, 3).",
        ),
        (dict(output_final_state="yes"), "`output_final_state` must be True or False"),
        (dict(activation="relu"), "`activation` must be one of ('silu', 'sigmoid', None); got 'relu'."),
        (dict(cu_seqlens=spec(2, dtype=jnp.int32)), "`cu_seqlens` must come with a batch of 1; got B = 2."),
        (ONE | dict(cu_seqlens=jnp.array([0, 9])), "`cu_seqlens` must rise from 0 to at most T = 8; got [0, 9]."),
        (dict(segment_ids=spec(2, 8)), "`segment_ids` must be int32 of shape (2, 8); got float32 (2, 8)."),
        (
            ONE | dict(cu_seqlens=jnp.array([0, 8]), segment_ids=spec(1, 8, dtype=jnp.int32)),
            "`segment_ids` must be None if `cu_seqlens` is given; got both.",
        ),
        (dict(implementation="gpu"), "`implementation` must be None or one of ('pallas', 'xla'); got 'gpu'."),
        (dict(config=Config(20, 128)), "`config` must have multiples of 16 tokens and of 128 channels"),
    ],
)
def test_value_error(wrong, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        causal_conv1d(**GOOD | wrong)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (dict(states=spec(3, 3, 16)), "`states` must have shape [slots, W-1, D] = (2, 3, 16); got (3, 3, 16)."),
        (dict(state_indices=spec(3, dtype=jnp.int32)), "`state_indices` must be int32 of shape (2,); got int32 (3,)."),
        (dict(has_initial_state=spec(2)), "`has_initial_state` must be bool of shape (2,); got float32 (2,)."),
        (dict(activation="relu"), "`activation` must be one of ('silu', 'sigmoid', None); got 'relu'."),
    ],
)
def test_value_error_of_the_update(wrong, message):
    good = GOOD | dict(x=spec(2, 1, 16), states=spec(2, 3, 16))
    with pytest.raises(ValueError, match=re.escape(message)):
        causal_conv1d_update(**good | wrong)
