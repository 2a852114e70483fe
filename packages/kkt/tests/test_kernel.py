"""The tile mathematics by itself, and the kernel around it."""

import jax.numpy as jnp
import numpy as np
import pytest

from chunkwise.kkt import chunk_scaled_dot_kkt
from chunkwise.kkt.tile import kkt_tile
from chunkwise.shared.testing.cases import Case
from chunkwise.shared.testing.compare import STAGE_TOLERANCE, assert_close


@pytest.mark.parametrize("per_channel", [False, True])
def test_tile(per_channel):
    rng = np.random.default_rng(0)
    k, beta = rng.standard_normal((2, 16, 5)), rng.standard_normal((4, 1, 16))
    G = -np.cumsum(rng.random((4, 16, 5 if per_channel else 1)), axis=1)
    (A,) = kkt_tile(*(jnp.asarray(x, jnp.float32) for x in (k, beta, G if per_channel else G.mT)))
    k, pairs = np.repeat(k, 2, axis=0), np.tril(np.ones((16, 16)), -1)
    decay = np.exp(np.where(pairs[..., None], G[:, :, None] - G[:, None], 0.0))
    assert_close("A", A, beta.mT * pairs * np.einsum("hic,hijc,hjc->hij", k, decay * np.ones(5), k), STAGE_TOLERANCE)


def test_strictly_lower_and_finite_where_the_decay_above_the_diagonal_overflows():
    x = Case(T=64, K=8, gate="strong").arguments()
    A = chunk_scaled_dot_kkt(x["k"], x["beta"], x["g_cum"], implementation="pallas")
    assert np.isfinite(A).all()
    assert not np.triu(A[0, :, 0]).any()
