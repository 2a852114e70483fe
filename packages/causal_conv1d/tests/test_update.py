"""Decoding: against the convolution of whole sequences, and the pool of states."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from chunkwise.causal_conv1d import causal_conv1d, causal_conv1d_update
from chunkwise.shared.testing.compare import assert_close
from chunkwise.shared.testing.inputs import boundaries

B, T, D, W = 3, 9, 5, 4


def inputs():
    rng = np.random.default_rng(0)
    draw = lambda *shape: jnp.asarray(rng.standard_normal(shape), jnp.float32)
    return draw(B, T, D), draw(D, W), draw(D), draw(B, W - 1, D)


@pytest.mark.parametrize("tokens", [1, 2, 4])
def test_steps_are_the_convolution(tokens):
    x, weight, bias, state = inputs()
    want, last = causal_conv1d(x, weight, bias, state, True, implementation="xla")
    steps = []
    for t in range(0, T, tokens):
        y, state = causal_conv1d_update(x[:, t : t + tokens], state, weight, bias)
        steps.append(y)
    assert_close("y", jnp.concatenate(steps, axis=1), want, 1e-6)
    np.testing.assert_array_equal(state, last)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_pool(dtype):
    """A sequence without a slot, or without a state in it, starts from zeros; slots without a name keep every bit."""
    x, weight, bias, _ = inputs()
    pool = jnp.asarray(np.random.default_rng(1).standard_normal((6, W - 1, D)), dtype).at[2].set(jnp.nan)
    slots, flags = jnp.array([4, -1, 2], jnp.int32), jnp.array([True, True, False])
    y, after = causal_conv1d_update(x[:, :1], pool, weight, bias, state_indices=slots, has_initial_state=flags)
    before = jnp.zeros((B, W - 1, D), dtype).at[0].set(pool[4])
    want, last = causal_conv1d(x[:, :1], weight, bias, before, True, implementation="xla")
    assert_close("y", y, want, 1e-6)
    assert after.dtype == dtype
    np.testing.assert_array_equal(after[jnp.array([4, 2])], last[jnp.array([0, 2])].astype(dtype))
    np.testing.assert_array_equal(after[jnp.array([0, 1, 3, 5])], pool[jnp.array([0, 1, 3, 5])])


def test_packed_sequences_of_several_lengths():
    x, weight, bias, state = inputs()
    packed, cu_seqlens = x[:1, :6], boundaries(1, 0, 4)
    y, after = causal_conv1d_update(packed, state, weight, bias, cu_seqlens=cu_seqlens)
    want, last = causal_conv1d(packed, weight, bias, state, True, cu_seqlens=cu_seqlens, implementation="xla")
    np.testing.assert_array_equal(y, want)
    np.testing.assert_array_equal(after, last)
    np.testing.assert_array_equal(after[1], state[1])


def test_a_donated_pool_is_updated_in_place():
    x, weight, bias, _ = inputs()
    pool = jnp.zeros((16, W - 1, D))
    update = jax.jit(causal_conv1d_update, donate_argnums=1)
    text = update.lower(x[:, :1], pool, weight, bias, state_indices=jnp.arange(B, dtype=jnp.int32)).compile().as_text()
    assert "input_output_alias" in text


def test_gradients():
    x, weight, bias, state = inputs()
    loss = lambda f: lambda x, s: sum(jnp.sum(jnp.sin(y)) for y in f(x, s))
    slots = jnp.arange(B, dtype=jnp.int32)
    got = jax.grad(loss(lambda x, s: causal_conv1d_update(x, s, weight, bias, state_indices=slots)), (0, 1))(x, state)
    want = jax.grad(loss(lambda x, s: causal_conv1d(x, weight, bias, s, True, implementation="xla")), (0, 1))(x, state)
    for a, b in zip(got, want, strict=True):
        assert_close("gradient", a, b, 1e-6)
