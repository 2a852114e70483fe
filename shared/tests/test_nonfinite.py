"""Finding what is not finite, row by row and sequence by sequence."""

import jax.numpy as jnp
import numpy as np
import pytest

from chunkwise.shared.kernels.spans.nonfinite import not_finite, only_if, rows_not_finite, whole_sequences

BAD = (jnp.nan, jnp.inf, -jnp.inf, -jnp.nan)


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_rows_and_their_sequences(bad, dtype):
    """Two bad rows of two tiles; the largest finite number is not one of them."""
    k = jnp.full((2, 6, 8), jnp.finfo(dtype).max, dtype).at[1, 1, 3].set(bad)
    v = -jnp.ones((3, 6, 4), dtype).at[2, 4, 0].set(bad)
    found = rows_not_finite(k, v)
    np.testing.assert_array_equal(found[0, :, 0], [0, 1, 0, 0, 1, 0])
    owner = jnp.array([0, 0, 0, 1, 2, 2])
    whole = whole_sequences(found, owner[None, :, None] == owner[None, None])
    np.testing.assert_array_equal(whole[0, :, 0], [1, 1, 1, 0, 1, 1])


@pytest.mark.parametrize("bad", [*BAD, 3e38])
def test_state(bad):
    assert not_finite(jnp.zeros((2, 16, 8)).at[1, 9, 2].set(bad)).item() == (0.0 if bad == 3e38 else 1.0)


def test_condition():
    ones = jnp.ones((1, 4, 1), jnp.float32)
    np.testing.assert_array_equal(only_if(jnp.array(True), lambda: ones, 4), ones)
    np.testing.assert_array_equal(only_if(jnp.array(False), lambda: ones, 4), 0 * ones)
