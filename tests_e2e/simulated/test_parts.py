"""The kernels of the convolution and of the gated norm in the forms that the stages do not have."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from chunkwise import causal_conv1d
from tests import engine

D, W = 130, 4


THOROUGH = dict(
    test_convolution_over_a_pool=lambda pool: pool != "float32",
)


@pytest.mark.parametrize(("pool", "cores"), [("float32", 1), ("bfloat16", 2)])
def test_convolution_over_a_pool(pool, cores):
    """A serving step: decodes, one of them of two guesses, and prefills, which keep the state after a block."""
    rng, T, slots = np.random.default_rng(0), 40, 12
    weight, bias = rng.standard_normal((D, W)).astype(np.float32), rng.standard_normal(D).astype(np.float32)
    schedule = engine.SEQUENCES | dict(
        cu_seqlens=np.array([0, 1, 3, 3, 20, 33, -7], np.int32),
        block_state_indices=np.array([[1], [1], [-1], [10], [11], [99]], np.int32),
    )
    x = rng.standard_normal((1, T, D)).astype(np.float32)
    x[:, 33:] = np.nan
    states = rng.standard_normal((slots, W - 1, D)).astype(jnp.dtype(pool))
    states[[5, 10, 11]] = np.nan
    want = engine.Oracle(engine.convolution(weight.astype(np.float64), bias.astype(np.float64)), 8, states)
    want_y, written = want.run({"x": x}, schedule)
    counts = {name: jnp.int32(schedule[name]) for name in ("num_decodes", "num_sequences")}
    update = lambda x, states, schedule: causal_conv1d.causal_conv1d_update(
        x, states, weight, bias, activation=None, block_size=8, implementation="pallas", **schedule
    )
    y, after = jax.jit(update)(x, states, schedule | counts)
    np.testing.assert_allclose(y[0, :33], want_y, rtol=0, atol=1e-5)
    assert not np.asarray(y[0, 33:]).any()
    for slot in range(slots):
        if slot in written:
            np.testing.assert_array_equal(after[slot], want.states[slot].astype(states.dtype), f"slot {slot}")
        else:
            assert np.asarray(after[slot]).tobytes() == states[slot].tobytes(), f"slot {slot} has changed"
