"""Bad input gets one clear sentence, before anything is computed."""

import jax.numpy as jnp
import pytest

from chunkwise.pipeline import chunk_gated_delta_rule, recurrent_gated_delta_rule
from chunkwise.shared.testing import make_inputs

CASES = {
    "rank": ({"q": jnp.zeros((8, 2, 16))}, r"`q` must have shape \[B, T, H, K\]; got \(8, 2, 16\)"),
    "key shape": ({"k": jnp.zeros((1, 8, 2, 8))}, r"`k` must have shape .* = \(1, 8, 2, 16\); got \(1, 8, 2, 8\)"),
    "value tokens": ({"v": jnp.zeros((1, 9, 4, 16))}, r"`v` must have shape .* = \(1, 8, any, any\); got"),
    "heads": ({"v": jnp.zeros((1, 8, 3, 16))}, "`v` must have a multiple of the heads of `k`; got 3 value heads for 2"),
    "gate heads": ({"g": jnp.zeros((1, 8, 2))}, r"`g` must have shape .* = \(1, 8, 4\); got \(1, 8, 2\)"),
    "beta rank": ({"beta": jnp.zeros((1, 8, 4, 1))}, r"`beta` must have shape \[B, T, HV\]; got"),
    "integers": ({"v": jnp.zeros((1, 8, 4, 16), jnp.int32)}, "`v` must be float32, bfloat16 or float16; got int32"),
    "no array": ({"g": None}, r"`g` must be an array \[B, T, HV\]; got NoneType"),
    "no tokens": ({n: jnp.zeros((1, 0, 2, 16)) for n in "qk"}, "`q` must not be empty"),
    "state": (
        {"initial_state": jnp.zeros((2, 4, 16, 16))}, r"`initial_state` must have shape .* = \(1, 4, 16, 16\); got",
    ),
    "boundaries type": ({"cu_seqlens": jnp.zeros((2,), jnp.float32)}, "`cu_seqlens` must be int32 of shape"),
    "boundaries no array": ({"cu_seqlens": [0, 8]}, "`cu_seqlens` must be an int32 array"),
    "boundaries order": ({"cu_seqlens": jnp.array([0, 6, 4], jnp.int32)}, "`cu_seqlens` must rise from 0 to at most"),
    "boundaries end": ({"cu_seqlens": jnp.array([0, 9], jnp.int32)}, "`cu_seqlens` must rise from 0 to at most T = 8"),
    "implementation": ({"implementation": "cuda"}, "`implementation` must be None or one of .*; got 'cuda'"),
}  # fmt: skip


@pytest.mark.parametrize("operator", [chunk_gated_delta_rule, recurrent_gated_delta_rule])
@pytest.mark.parametrize("case", CASES)
def test_bad_argument(operator, case):
    change, message = CASES[case]
    with pytest.raises(ValueError, match=message):
        operator(**{**make_inputs(1, 8, 2, 4, 16, 16), **change})


def test_batch_with_boundaries():
    with pytest.raises(ValueError, match="`cu_seqlens` must come with a batch of 1; got B = 2"):
        chunk_gated_delta_rule(**make_inputs(2, 8, 1, 1, 16, 16), cu_seqlens=jnp.array([0, 8], jnp.int32))


def test_chunk_size():
    with pytest.raises(ValueError, match=r"`chunk_size` must be one of \(16, 32, 64, 128\); got 48"):
        chunk_gated_delta_rule(**make_inputs(1, 8, 1, 1, 16, 16), chunk_size=48)
