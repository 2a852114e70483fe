"""The mean over groups of lanes, and how the kernels are launched."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from chunkwise.norm_gated import rms_norm_gated
from chunkwise.norm_gated.config import default_for
from chunkwise.norm_gated.tile import group_mean
from chunkwise.shared.testing.tpu import text_for_tpu


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


def test_one_launch_a_direction():
    x, w = jnp.zeros((1, 64, 4, 128), jnp.bfloat16), jnp.zeros(128)
    f = lambda x, z, w: rms_norm_gated(x, z, w, implementation="pallas")
    assert text_for_tpu(f, x, x, w).count("tpu_custom_call") == 1
    gradient = lambda x, z, w, dy: jax.vjp(f, x, z, w)[1](dy)
    text = text_for_tpu(gradient, x, x, w, x)
    assert "rms_norm_gated_bwd_d128" in text
    assert text.count("@tpu_custom_call") <= 2  # the forward that nobody reads is not there after compilation
