"""The mean over groups of lanes, and tile sizes."""

import jax.numpy as jnp
import numpy as np
import pytest

from chunkwise.norm_gated.config import default_for
from chunkwise.norm_gated.tile import group_mean


@pytest.mark.parametrize(("groups", "D"), [(2, 64), (4, 96), (2, 128), (2, 192), (3, 40), (1, 70)])
def test_group_mean(groups, D):
    x = np.random.default_rng(0).standard_normal((8, groups * D)).astype(np.float32)
    want = np.repeat(x.reshape(8, groups, D).mean(axis=2), D, axis=1)
    np.testing.assert_allclose(group_mean(jnp.asarray(x), D), want, rtol=1e-5, atol=1e-6)


def test_blocks_hold_whole_units():
    for groups, D in ((32, 128), (64, 64), (128, 96), (512, 192), (1, 8192), (3, 40)):
        config = default_for(groups, D, 2)
        lanes = config.groups * D
        assert lanes % 128 == 0 or config.groups == groups
        assert config.rows % config.strip == 0
