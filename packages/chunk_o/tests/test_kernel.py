"""The tile mathematics by itself, and how the kernel is launched."""

import functools

import jax.numpy as jnp
import numpy as np
import pytest

from chunkwise.chunk_o import Config, chunk_fwd_o
from chunkwise.chunk_o.tile import output_tile
from chunkwise.shared.testing.cases import Case
from chunkwise.shared.testing.compare import STAGE_TOLERANCE, assert_close
from chunkwise.shared.testing.transforms import text_for_tpu

pytestmark = pytest.mark.interpreted
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


@pytest.mark.parametrize("heads", [1, 2, 4, 8])
def test_every_config_gives_the_same_bits(heads):
    x = Case(T=20, H=2, HV=8, K=16, V=8, chunk_size=16).arguments()
    run = functools.partial(chunk_fwd_o, *(x[name] for name in NAMES), chunk_size=16, implementation="pallas")
    np.testing.assert_array_equal(run(), run(config=Config(heads)))


def test_name():
    x = Case(T=64).arguments()
    text = text_for_tpu(functools.partial(chunk_fwd_o, implementation="pallas"), *(x[name] for name in NAMES))
    assert "chunk_fwd_o_fwd_c64" in text
