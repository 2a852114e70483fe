"""The mean over groups of lanes, tile sizes, and what the documentation says of the call and its cost."""

import jax.numpy as jnp
import numpy as np
import pytest

from chunkwise.norm_gated import rms_norm_gated
from chunkwise.norm_gated.config import cost, default_for
from chunkwise.norm_gated.tile import group_mean
from tests.documents import check_call, documented_flops


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


def test_documented_flops():
    assert cost(rows=300, D=96).flops == documented_flops(rms_norm_gated, R=300, D=96)


def test_help_opens_with_the_call():
    check_call(rms_norm_gated, B=1, T=8, H=2, D=6)


def test_bytes():
    # x, z and y; then x, z, dy, dx and dz.
    assert cost(rows=10, D=8, itemsize=2).bytes_accessed == 3 * 10 * 8 * 2
    assert cost(rows=10, D=8, itemsize=4, backward=True).bytes_accessed == 5 * 10 * 8 * 4
    # Without z it is x and y; then x, dy and dx.
    assert cost(rows=10, D=8, itemsize=2, gated=False).bytes_accessed == 2 * 10 * 8 * 2
    assert cost(rows=10, D=8, itemsize=2, backward=True, gated=False).bytes_accessed == 3 * 10 * 8 * 2
