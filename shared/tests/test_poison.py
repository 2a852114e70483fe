"""The check of isolation finds what it looks for, and passes what is isolated."""

import jax.numpy as jnp
import numpy as np
import pytest

from chunkwise.shared.testing.inputs import boundaries
from tests.poison import assert_isolated


def tokens(*shape):
    return jnp.asarray(np.random.default_rng(0).standard_normal(shape), jnp.float32)


def of_sequences(T, cu_seqlens):
    """Return one-hot [N, T], zero on padding."""
    token = jnp.arange(T, dtype=jnp.int32)
    return (token >= cu_seqlens[:-1, None]) & (token < cu_seqlens[1:, None])


def masked_product(x, cu_seqlens):
    mask = of_sequences(x["v"].shape[1], cu_seqlens).astype(jnp.float32)
    return dict(final_state=mask @ x["v"][0])


@pytest.mark.parametrize(
    ("fn", "message"),
    [
        (masked_product, "NaN in the input v of sequence 0 changed final_state of others"),
        (lambda x, _: dict(o=jnp.where(x["v"] == x["v"], x["v"], 0.0)), "is hidden: all of its results are finite"),
        (lambda x, _: dict(o=x["v"] / 0.0), "is not finite before anything is poisoned"),
        (lambda x, _: dict(o=x["v"] + 0.0 * jnp.sum(x["v"])), "changed o of others: "),
    ],
)
def test_finds_what_is_not(fn, message):
    with pytest.raises(AssertionError, match=message):
        assert_isolated(fn, dict(v=tokens(1, 5, 2)), boundaries(2, 3))


def test_gradients_count():
    # The value is selected, the cotangent is not: 0 * NaN.
    def fn(x, cu_seqlens):
        mask = of_sequences(5, cu_seqlens).astype(jnp.float32)
        return dict(final_state=mask @ jnp.where(jnp.isfinite(x["v"][0]), x["v"][0], 0.0) + 0.0 * x["initial_state"])

    with pytest.raises(AssertionError, match="NaN in the cotangent of final_state of sequence 0 changed dv of others"):
        assert_isolated(fn, dict(v=tokens(1, 5, 2), initial_state=tokens(2, 2)), boundaries(2, 3), visible=False)
