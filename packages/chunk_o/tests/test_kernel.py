"""The tile mathematics by itself, and the kernel around it."""

import jax.numpy as jnp
import numpy as np

from chunkwise.chunk_o import chunk_fwd_o
from chunkwise.chunk_o.config import cost
from chunkwise.chunk_o.tile import output_tile
from chunkwise.shared.testing.cases import Case
from chunkwise.shared.testing.compare import STAGE_TOLERANCE, assert_close

NAMES = ("q", "k", "v_new", "h", "g_cum")


def test_tile():
    rng = np.random.default_rng(0)
    shapes = [(2, 16, 5), (2, 16, 5), (4, 16, 3), (4, 5, 3), (4, 16, 1), (4, 16, 16)]
    x = [rng.standard_normal(shape) for shape in shapes]
    o = output_tile(*(jnp.asarray(y, jnp.float32) for y in x), 0.5)
    q, k, v, h, from_start, scores = x
    q, k = (np.repeat(y, 2, axis=0) for y in (q, k))
    own = np.sum(q * k, axis=2, keepdims=True)
    assert_close("o", o, 0.5 * (from_start * (q @ h) + scores @ v + own * v), STAGE_TOLERANCE)


def test_finite_where_the_decay_above_the_diagonal_overflows():
    case = Case(T=64, K=8, V=4, gate="strong")
    x = case.arguments()
    assert np.isfinite(chunk_fwd_o(*(x[name] for name in NAMES), implementation="pallas")).all()


def test_flops_of_the_gradient():
    sizes = dict(B=2, T=384, H=6, HV=6, K=96, V=80, C=64)
    # The scores, and the gradients of both operands of three products.
    assert cost(**sizes, backward=True).flops == 2 * cost(**sizes).flops + 2 * 2 * 384 * 6 * 64 * 96
