"""The tile mathematics by itself, and how the kernel is launched."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from chunkwise.shared.testing.cases import Case
from chunkwise.shared.testing.compare import STAGE_TOLERANCE, assert_close
from chunkwise.shared.testing.transforms import text_for_tpu
from chunkwise.wy_fast import Config, recompute_w_u
from chunkwise.wy_fast.tile import wy_tile

pytestmark = pytest.mark.interpreted
NAMES = ("k", "v", "beta", "A_inv", "g_cum")


def test_tile():
    rng = np.random.default_rng(0)
    shapes = [(2, 16, 5), (4, 16, 3), (4, 16, 16), (4, 1, 16), (4, 16, 1)]
    k, v, A_inv, beta, from_start = (rng.standard_normal(shape) for shape in shapes)
    w, u = wy_tile(*(jnp.asarray(x, jnp.float32) for x in (k, v, A_inv, beta, from_start)))
    assert_close("w", w, A_inv @ (beta.mT * from_start * np.repeat(k, 2, axis=0)), STAGE_TOLERANCE)
    assert_close("u", u, A_inv @ (beta.mT * v), STAGE_TOLERANCE)


@pytest.mark.parametrize("heads", [1, 2, 4, 8])
def test_every_config_gives_the_same_bits(heads):
    x = Case(T=20, H=2, HV=8, K=16, V=8, chunk_size=16).arguments()
    run = functools.partial(recompute_w_u, *(x[name] for name in NAMES), implementation="pallas")
    jax.tree.map(np.testing.assert_array_equal, run(), run(config=Config(heads)))


def test_name():
    x = Case(T=64).arguments()
    text = text_for_tpu(functools.partial(recompute_w_u, implementation="pallas"), *(x[name] for name in NAMES))
    assert "recompute_w_u_fwd_c64" in text
