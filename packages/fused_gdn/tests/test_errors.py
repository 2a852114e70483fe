"""What the functions refuse, and how they say it."""

import re

import jax.numpy as jnp
import numpy as np
import pytest

from chunkwise.fused_gdn import (
    Config,
    chunk_gated_delta_rule,
    ragged_gated_delta_rule,
    recurrent_gated_delta_rule,
)
from chunkwise.shared.testing.inputs import make_inputs

CASES = [
    (dict(k=jnp.zeros((1, 8, 2))), "`k` must have shape [B, T, H, K]; got (1, 8, 2)."),
    (
        dict(v=jnp.zeros((1, 8, 3, 16))),
        "`v` must have a multiple of the heads of `k`; got 3 value heads for 2 key heads.",
    ),
    (dict(g=jnp.zeros((1, 8, 2))), "`g` must have shape [B, T, HV] = (1, 8, 4); got (1, 8, 2)."),
    (dict(beta=jnp.zeros((1, 8, 4), jnp.int32)), "`beta` must be float32, bfloat16 or float16; got int32."),
    (dict(initial_state=jnp.zeros((2, 4, 16, 16))), "`initial_state` must have shape [N, HV, K, V] = (1, 4, 16, 16)"),
    (dict(cu_seqlens=jnp.array([0, 9], jnp.int32)), "`cu_seqlens` must rise from 0 to at most T = 8; got [0, 9]."),
    (dict(implementation="cuda"), "`implementation` must be None or one of ('fused', "),
]


@pytest.mark.parametrize("function", [chunk_gated_delta_rule, recurrent_gated_delta_rule])
@pytest.mark.parametrize(("bad", "message"), CASES)
def test_common(function, bad, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        function(**{**make_inputs(1, 8, 2, 4, 16, 16), **bad})


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (Config(heads=3, heads_bwd=4), "`config.heads` must divide 4 value heads; got 3."),
        (
            Config(heads=4, heads_bwd=2),
            "`config.heads_bwd` must be all 4 value heads, or so many that those of K = 16 and of V = 16 channels each "
            "fill whole registers of 128; got 2.",
        ),
        (Config(4, 4, turns=0), "`config.turns` must be a whole number above 0; got 0."),
        (Config(4, 4.0), "`config.heads_bwd` must be a whole number above 0; got 4.0."),
        (dict(heads=4), "`config` must be None or a chunkwise.fused_gdn.Config; got {'heads': 4}."),
    ],
)
def test_config(config, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        chunk_gated_delta_rule(**make_inputs(1, 8, 2, 4, 16, 16), implementation="fused", config=config)


def test_wide_heads():
    with pytest.raises(NotImplementedError, match='"fused" takes K and V up to 256; got 16 and 320'):
        chunk_gated_delta_rule(**make_inputs(1, 8, 1, 1, 16, 320), implementation="fused")


def test_decode_of_too_many_tokens():
    with pytest.raises(NotImplementedError, match="takes a few tokens per sequence"):
        recurrent_gated_delta_rule(**make_inputs(1, 20000, 1, 1, 16, 16), implementation="fused")


# A pool comes with boundaries too.
THOROUGH = dict(test_wide_integers_of_numpy_are_those_of_32_bits=lambda name: name != "state_indices")


@pytest.mark.parametrize("name", ["cu_seqlens", "segment_ids", "state_indices", "step"])
def test_wide_integers_of_numpy_are_those_of_32_bits(name):
    """numpy counts in 64 bits."""
    x, pool = make_inputs(1, 8, 1, 2, 16, 16), jnp.ones((4, 2, 16, 16))
    boundaries, indices = np.array([0, 3, 8]), np.array([2, 0])

    def call(of):
        if name == "segment_ids":
            return chunk_gated_delta_rule(**x, segment_ids=of(np.array([[0] * 3 + [1] * 5])))
        if name == "cu_seqlens":
            return chunk_gated_delta_rule(**x, cu_seqlens=of(boundaries))
        slots = dict(cu_seqlens=of(boundaries), state_indices=of(indices))
        if name == "state_indices":
            return recurrent_gated_delta_rule(**x, **slots, initial_state=pool, output_final_state=True)
        slots |= dict(read_indices=of(np.array([1, 3])), num_decodes=of(np.array(0)), num_sequences=of(np.array(2)))
        return ragged_gated_delta_rule(**x, **slots, states=pool)

    for have, want in zip(call(lambda y: y), call(lambda y: jnp.asarray(y, jnp.int32)), strict=True):
        if want is not None:
            np.testing.assert_array_equal(have, want)
