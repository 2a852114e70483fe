"""Gates that would overflow, and the cost."""

import numpy as np

from chunkwise.chunk_o import chunk_fwd_o
from chunkwise.chunk_o.config import cost
from chunkwise.shared.testing.cases import Case

NAMES = ("q", "k", "v_new", "h", "g_cum")


def test_finite_where_the_decay_above_the_diagonal_overflows():
    case = Case(T=64, K=8, V=4, gate="strong")
    x = case.arguments()
    assert np.isfinite(chunk_fwd_o(*(x[name] for name in NAMES), implementation="pallas")).all()


def test_flops_of_the_gradient():
    sizes = dict(B=2, T=384, H=6, HV=6, K=96, V=80, C=64)
    # The scores, and the gradients of both operands of three products.
    assert cost(**sizes, backward=True).flops == 2 * cost(**sizes).flops + 2 * 2 * 384 * 6 * 64 * 96
