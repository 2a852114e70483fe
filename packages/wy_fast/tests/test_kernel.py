"""The tile mathematics by itself, and the kernel around it."""

import jax.numpy as jnp
import numpy as np

from chunkwise.shared.testing.compare import STAGE_TOLERANCE, assert_close
from chunkwise.wy_fast.tile import wy_tile

NAMES = ("k", "v", "beta", "A_inv", "g_cum")


def test_tile():
    rng = np.random.default_rng(0)
    shapes = [(2, 16, 5), (4, 16, 3), (4, 16, 16), (4, 1, 16), (4, 16, 1)]
    k, v, A_inv, beta, from_start = (rng.standard_normal(shape) for shape in shapes)
    w, u = wy_tile(*(jnp.asarray(x, jnp.float32) for x in (k, v, A_inv, beta, from_start)))
    assert_close("w", w, A_inv @ (beta.mT * from_start * np.repeat(k, 2, axis=0)), STAGE_TOLERANCE)
    assert_close("u", u, A_inv @ (beta.mT * v), STAGE_TOLERANCE)
