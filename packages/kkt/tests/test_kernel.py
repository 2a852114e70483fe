"""What the kernel leaves out of its products."""

import numpy as np

from chunkwise.kkt import chunk_scaled_dot_kkt
from chunkwise.shared.testing.cases import Case


def test_strictly_lower_and_finite_where_the_decay_above_the_diagonal_overflows():
    x = Case(T=64, K=8, gate="strong").arguments()
    A = chunk_scaled_dot_kkt(x["k"], x["beta"], x["g_cum"], implementation="pallas")
    assert np.isfinite(A).all()
    assert not np.triu(A[0, :, 0]).any()
