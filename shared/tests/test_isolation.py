"""The quarantine of streams in plain JAX: which tokens it finds, and what their results and gradients are."""

import jax
import jax.numpy as jnp
import numpy as np

from chunkwise.shared.kernels.chunking import select_tokens
from chunkwise.shared.plain.isolation import keep_apart, nonfinite_tokens

# Sequences of 3, 0, 4 tokens, and one token of padding.
CU_SEQLENS = jnp.array([0, 3, 3, 7], jnp.int32)
T = 8


def test_whole_sequences_are_found():
    k = jnp.ones((1, T, 2, 4))
    for token, expected in ((1, [0, 1, 2]), (6, [3, 4, 5, 6]), (7, [])):
        for value in (jnp.nan, jnp.inf):
            found = nonfinite_tokens((jnp.ones((1, T, 3)), k.at[0, token, 1, 2].set(value)), CU_SEQLENS)
            assert np.flatnonzero(found).tolist() == expected


def test_selected_tokens_keep_their_type():
    x = jnp.arange(1, T + 1, dtype=jnp.bfloat16).reshape(1, T, 1)
    y = select_tokens(jnp.arange(T) < 2, x, jnp.nan)
    assert y.dtype == jnp.bfloat16
    assert y[0, :2, 0].tolist() == [1, 2]
    assert jnp.isnan(y[0, 2:]).all()


def test_results_are_marked_and_padding_is_zero():
    o, v = jnp.full((1, T, 1, 2), 3.0), jnp.full((1, T, 1, 2), jnp.nan).at[:, 3:7].set(1.0)
    y = keep_apart(o, v, nonfinite_tokens((v,), CU_SEQLENS), CU_SEQLENS)
    assert jnp.isnan(y[:, :3]).all()
    assert (y[:, 3:7] == 3.0).all()
    assert (y[:, 7] == 0.0).all()


def test_cotangents_that_are_not_finite_stay_in_their_sequence():
    o, v, spoilt = jnp.ones((1, T, 1, 2)), jnp.ones((1, T, 1, 2)), jnp.zeros(T, bool)
    _, pull = jax.vjp(lambda o, v: keep_apart(o, v, spoilt, CU_SEQLENS), o, v)
    do, dv = pull(jnp.ones_like(o).at[0, 1, 0, 0].set(jnp.nan))
    assert (do[:, :3] == 0.0).all()
    assert (do[:, 3:7] == 1.0).all()
    assert (do[:, 7] == 0.0).all()
    # Nothing is hidden: the gradient of v says where it was.
    assert np.argwhere(np.isnan(dv)).tolist() == [[0, 1, 0, 0]]
    assert (np.nan_to_num(dv) == 0.0).all()
