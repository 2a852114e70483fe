"""One sentence for every wrong argument."""

import re

import jax
import jax.numpy as jnp
import pytest

from chunkwise.shared.operators import (
    check_array,
    check_chunk_size,
    check_cu_seqlens,
    check_heads,
    check_initial_state,
    choose_implementation,
)
from chunkwise.shared.testing import spec


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: check_array("k", 1.0, "B T"), "`k` must be an array [B, T]; got float."),
        (lambda: check_array("k", spec(2), "B T"), "`k` must have shape [B, T]; got (2,)."),
        (lambda: check_array("k", spec(2, 0), "B T"), "`k` must not be empty; got (2, 0)."),
        (
            lambda: check_array("k", spec(2, 3), "B T", (None, 4)),
            "`k` must have shape [B, T] = (any, 4); got (2, 3).",
        ),
        (
            lambda: check_array("k", spec(2, dtype=jnp.int32), "T"),
            "`k` must be float32, bfloat16 or float16; got int32.",
        ),
        (lambda: check_heads(2, 3), "`v` must have a multiple of the heads of `k`; got 3 value heads for 2 key heads."),
        (lambda: check_chunk_size(65), "`chunk_size` must be one of (16, 32, 64, 128); got 65."),
        (lambda: check_chunk_size("64"), "`chunk_size` must be one of (16, 32, 64, 128); got '64'."),
        (
            lambda: choose_implementation("gpu", ("pallas", "xla"), "pallas"),
            "`implementation` must be None or one of ('pallas', 'xla'); got 'gpu'.",
        ),
        (lambda: check_cu_seqlens([0, 1], 1, 1), "`cu_seqlens` must be an int32 array [N + 1]; got list."),
        (
            lambda: check_cu_seqlens(jnp.zeros((1,), jnp.int32), 1, 1),
            "`cu_seqlens` must be int32 of shape [N + 1] with N >= 1; got int32 (1,).",
        ),
        (
            lambda: check_cu_seqlens(jnp.zeros((2, 2), jnp.int32), 1, 1),
            "`cu_seqlens` must be int32 of shape [N + 1] with N >= 1; got int32 (2, 2).",
        ),
        (
            lambda: check_cu_seqlens(jnp.array([0, 5]), 2, 5),
            "`cu_seqlens` must come with a batch of 1; got B = 2.",
        ),
        (
            lambda: check_cu_seqlens(jnp.arange(12), 1, 5),
            "`cu_seqlens` must rise from 0 to at most T = 5; got [0, 1, 2, 3, 4, 5, 6, 7, '...'].",
        ),
        (
            lambda: check_initial_state(spec(1, 2, 3, 4), (1, 2, 4, 3)),
            "`initial_state` must have shape [N, HV, K, V] = (1, 2, 4, 3); got (1, 2, 3, 4).",
        ),
    ],
)
def test_value_error(call, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        call()


def test_what_is_right_passes():
    assert check_array("k", spec(2, 3, dtype=jnp.bfloat16), "B T", (None, 3)) == (2, 3)
    assert choose_implementation(None, ("pallas", "xla"), "pallas") == "xla"
    check_heads(2, 6)
    check_initial_state(None, (1, 1, 1, 1))
    check_cu_seqlens(jnp.array([0, 0, 4]), 1, 5)


def test_traced_boundaries_are_not_read():
    jax.eval_shape(lambda cu: check_cu_seqlens(cu, 1, 5), spec(3, dtype=jnp.int32))
