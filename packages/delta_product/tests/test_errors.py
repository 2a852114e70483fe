"""Wrong arguments raise an error in the words of the function that was called, before anything is computed."""

import re

import jax.numpy as jnp
import numpy as np
import pytest

from chunkwise.delta_product import (
    chunk_gated_delta_product,
    ragged_gated_delta_product,
    recurrent_gated_delta_product,
)
from chunkwise.shared.serving import state_pool
from chunkwise.shared.testing.inputs import spec

INT = lambda *shape: spec(*shape, dtype=jnp.int32)
X = dict(
    q=spec(1, 4, 1, 8), k=spec(1, 8, 1, 8), v=spec(1, 8, 2, 8), g=spec(1, 4, 2), beta=spec(1, 8, 2), num_householder=2
)
STEP = dict(states=spec(6, 2, 8, 8), cu_seqlens=np.array([0, 2, 4]), state_indices=np.arange(2))
WRONG = [
    (dict(num_householder=3), "`k` must have shape [B, T*n, H, K] = (1, 12, 1, 8); got (1, 8, 1, 8)."),
    (dict(num_householder=0), "`num_householder` must be a whole number above 0; got 0."),
    (dict(num_householder=jnp.int32(2)), "`num_householder` must be a whole number above 0, known when the program"),
    (dict(v=spec(1, 4, 2, 8)), "`v` must have shape [B, T*n, HV, V] = (1, 8, any, any); got (1, 4, 2, 8)."),
    (dict(beta=spec(1, 4, 2)), "`beta` must have shape [B, T*n, HV] = (1, 8, 2); got (1, 4, 2)."),
    (dict(g=spec(1, 8, 2)), "`g` must have shape [B, T, HV] = (1, 4, 2); got (1, 8, 2)."),
    (dict(g=None, use_gate_in_kernel=True), "`use_gate_in_kernel` must be False without `g`; got True."),
    (dict(cu_seqlens=np.array([0, 5])), "`cu_seqlens` must rise from 0 to at most T = 4; got [0, 5]."),
]  # fmt: skip


@pytest.mark.parametrize(("wrong", "message"), WRONG)
@pytest.mark.parametrize("function", [chunk_gated_delta_product, recurrent_gated_delta_product])
def test_errors(function, wrong, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        function(**X | wrong)


def test_ids_are_of_the_tokens_of_q():
    with pytest.raises(ValueError, match=re.escape("`segment_ids` must be int32 of shape (1, 4); got int32 (1, 8).")):
        chunk_gated_delta_product(**X, segment_ids=INT(1, 8))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (dict(cu_seqlens=np.array([0, 3, 4]), num_decodes=2, state_indices=np.arange(4).reshape(2, 2)),
         "`num_decodes` must count sequences of at most 2 tokens, which come first; got 2, and sequence 0 has 3."),
        (dict(states=state_pool.make_pool(6, 2, 8, 8, replay=3, H=1), num_decodes=1, decode_tokens=2),
         "`decode_tokens` must be at most 1, because every token takes 2 of the 3 tokens of the ring; got 2."),
        (dict(block_size=24, block_state_indices=np.array([[2], [3]]), chunk_size=16),
         "`block_size` must be a multiple of the chunk size 16; got 24."),
    ],
)  # fmt: skip
def test_errors_of_steps(wrong, message):
    x = {name: jnp.zeros(y.shape) if hasattr(y, "dtype") and name in X else y for name, y in (X | STEP | wrong).items()}
    with pytest.raises(ValueError, match=re.escape(message)):
        ragged_gated_delta_product(**x)
