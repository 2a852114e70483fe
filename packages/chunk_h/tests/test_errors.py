"""Every ValueError, by its text; the arguments are shapes only, so nothing can have been computed."""

import re

import jax
import jax.numpy as jnp
import pytest

from chunkwise.chunk_h import chunk_fwd_h, chunk_gated_delta_rule_fwd_h
from chunkwise.shared.testing.inputs import spec

DELTA = dict(k=spec(2, 64, 2, 8), w=spec(2, 64, 4, 8), u=spec(2, 64, 4, 6), g_cum=spec(2, 64, 4))
LINEAR = dict(k=spec(2, 64, 2, 8), v=spec(2, 64, 4, 6))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (dict(u=spec(2, 64, 4)), "`u` must have shape [B, T, HV, V]; got (2, 64, 4)."),
        (dict(k=spec(2, 63, 2, 8)), "`k` must have shape [B, T, H, K] = (2, 64, any, any); got (2, 63, 2, 8)."),
        (dict(k=spec(2, 64, 2, 8, dtype=jnp.int32)), "`k` must be float32, bfloat16 or float16; got int32."),
        (dict(w=spec(2, 64, 2, 8)), "`w` must have shape [B, T, HV, K] = (2, 64, 4, 8); got (2, 64, 2, 8)."),
        (dict(g_cum=spec(2, 64, 2)), "`g_cum` must have shape [B, T, HV] = (2, 64, 4); got (2, 64, 2)."),
        (dict(k=spec(2, 64, 3, 8)), "`u` must have a multiple of the heads of `k`; got 4 value heads for 3 key heads."),
        (
            dict(output_final_state=jnp.ones(1)),
            "`output_final_state` must be True or False, known when the program is built; got an array float32 (1,).",
        ),
        (
            dict(initial_state=spec(1, 4, 8, 6)),
            "`initial_state` must have shape [N, HV, K, V] = (2, 4, 8, 6); got (1, 4, 8, 6).",
        ),
    ],
)
def test_delta_rule(wrong, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        chunk_gated_delta_rule_fwd_h(**DELTA | wrong)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (dict(v=spec(2, 64, 4)), "`v` must have shape [B, T, HV, V]; got (2, 64, 4)."),
        (dict(g_cum=spec(2, 64, 2)), "`g_cum` must have shape [B, T, HV] = (2, 64, 4); got (2, 64, 2)."),
        (dict(k=spec(2, 64, 3, 8)), "`v` must have a multiple of the heads of `k`; got 4 value heads for 3 key heads."),
        (dict(g_gamma=spec(2)), "`g_gamma` must have shape [HV] = (4); got (2,)."),
        (dict(gk_cum=spec(2, 64, 4)), "`gk_cum` must have shape [B, T, HV, K]; got (2, 64, 4)."),
        (
            dict(gk_cum=spec(2, 64, 4, 8), g_gamma=spec(4)),
            "`gk_cum` must come without `g_cum` and `g_gamma`; got both.",
        ),
    ],
)
def test_linear_attention(wrong, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        chunk_fwd_h(**LINEAR | wrong)


def test_traced_static_arguments():
    run = lambda flag, size: chunk_fwd_h(**LINEAR, output_final_state=flag, chunk_size=size)
    with pytest.raises(ValueError, match=re.escape("known when the program is built; got an array bool ().")):
        jax.eval_shape(run, spec(dtype=bool), spec(dtype=jnp.int32))
    with pytest.raises(
        ValueError,
        match=re.escape(
            "`chunk_size` must be one of (16, 32, 64, 128), known when the program is built; got an array int32 ()."
        ),
    ):
        jax.eval_shape(lambda size: chunk_fwd_h(**LINEAR, chunk_size=size), spec(dtype=jnp.int32))
