"""The mean over groups of lanes, and how the kernels are launched."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from chunkwise.norm_gated import Config, rms_norm_gated
from chunkwise.norm_gated.config import default_for
from chunkwise.norm_gated.tile import group_mean
from chunkwise.shared.testing.compare import assert_close
from chunkwise.shared.testing.tpu import text_for_tpu

THOROUGH = dict(test_every_config_gives_the_same=True)


@pytest.mark.parametrize(("groups", "D"), [(2, 64), (4, 96), (2, 128), (2, 192), (3, 40), (1, 70)])
def test_group_mean(groups, D):
    x = np.random.default_rng(0).standard_normal((8, groups * D)).astype(np.float32)
    want = np.repeat(x.reshape(8, groups, D).mean(axis=2), D, axis=1)
    np.testing.assert_allclose(group_mean(jnp.asarray(x), D), want, rtol=1e-5, atol=1e-6)


def test_every_config_gives_the_same():
    rng = np.random.default_rng(0)
    x, z, dy = (jnp.asarray(rng.standard_normal((1, 50, 4, 32)), jnp.float32) for _ in range(3))
    weight = jnp.asarray(rng.standard_normal(32), jnp.float32)

    def run(config):
        f = lambda *a: rms_norm_gated(*a, implementation="pallas", config=config)
        y, pull = jax.vjp(f, x, z, weight)
        return y, *pull(dy)

    run = jax.jit(run, static_argnums=0)
    for config in (Config(16, 4, 16), Config(32, 4, 32), Config(64, 4, 16)):
        for name, got, want in zip(("y", "dx", "dz", "dweight"), run(config), run(None), strict=True):
            assert_close(name, got, want, 1e-6)


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
