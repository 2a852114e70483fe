"""The settings of Mamba-2's mixer in which hybrid models differ, from a checkpoint, against the layer in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from chunkwise.layers import Mamba2Config, init_mamba2_mixer, load_mamba2_mixer, mamba2_mixer, shardings
from chunkwise.shared.testing.compare import assert_close
from tests.layer_oracle import oracle

T, D, H, HV, K, V, W = 5, 6, 2, 4, 3, 2, 4
CHANNELS = HV * V + 2 * H * K
SCALED = dict(in_multiplier=0.5, multipliers=(0.5, 1.5, 0.7, 1.2, 0.8))
CONFIGS = {
    "after, biases": dict(norm="after", in_bias=True, out_bias=True),
    "before, multipliers": dict(norm="before", in_bias=True, **SCALED),
    "no norm": dict(norm=None, out_bias=True, conv_bias=False),
}


def checkpoint(c: Mamba2Config) -> dict[str, np.ndarray]:
    """Arrays by the names of transformers."""
    rng = np.random.default_rng(0)
    shapes = {
        "in_proj.weight": (HV * V + CHANNELS + HV, D), "conv1d.weight": (CHANNELS, 1, W), "A_log": (HV,),
        "dt_bias": (HV,), "D": (HV,), "out_proj.weight": (D, HV * V),
    }  # fmt: skip
    shapes |= {"in_proj.bias": (HV * V + CHANNELS + HV,)} if c.in_bias else {}
    shapes |= {"conv1d.bias": (CHANNELS,)} if c.conv_bias else {}
    shapes |= {"out_proj.bias": (D,)} if c.out_bias else {}
    shapes |= {} if c.norm is None else {"norm.weight": (HV * V,)}
    return {name: rng.standard_normal(shape, np.float32) for name, shape in shapes.items()}


def parts(x: np.ndarray, *sizes: int) -> list[np.ndarray]:
    """Return the parts of the last dimension of x."""
    return np.split(x, np.cumsum(sizes)[:-1], axis=-1)


@pytest.mark.parametrize("name", CONFIGS)
def test_settings(name):
    config = Mamba2Config(D, H, HV, K, V, W, **CONFIGS[name])
    named, x = checkpoint(config), np.random.default_rng(1).standard_normal((1, T, D), np.float32)
    weights = load_mamba2_mixer(named, config)
    # A file has z, x, B, C and dt: v, k and q are x, B and C.
    order, sizes = ("z", "v", "k", "q", "dt"), (HV * V, HV * V, H * K, H * K, HV)
    of_file = dict(zip(order, parts(named["in_proj.weight"].T, *sizes), strict=True))
    of_file["conv"] = tuple(y.T for y in parts(named["conv1d.weight"][:, 0].T, *sizes[1:4]))[::-1]
    if config.conv_bias:
        of_file["bias"] = tuple(parts(named["conv1d.bias"], *sizes[1:4]))[::-1]
    if config.in_bias:
        biases = dict(zip(order, parts(named["in_proj.bias"], *sizes), strict=True))
        of_file["in_bias"] = tuple(biases[part] for part in ("q", "k", "v", "z", "dt"))
    jax.tree.map(np.testing.assert_array_equal, {part: getattr(weights, part) for part in of_file}, of_file)
    y, _ = jax.jit(lambda x, weights: mamba2_mixer(x, weights, config))(x, weights)
    assert_close("y", y, oracle("mamba2_mixer", x, weights, config=config)[0], 1e-5)
    made = jax.eval_shape(lambda: init_mamba2_mixer(jax.random.key(0), config))
    assert jax.tree.map(jnp.shape, made) == jax.tree.map(jnp.shape, weights)
    assert jax.tree.structure(shardings(config, {}).weights) == jax.tree.structure(made)


def test_random_weights_obey_the_multipliers():
    """They are of the size of a checkpoint's weights, which the layer multiplies."""
    plain, scaled = (Mamba2Config(D, H, HV, K, V, W, norm=None, **change) for change in ({}, SCALED))
    made = (init_mamba2_mixer(jax.random.key(0), config)[:5] for config in (plain, scaled))
    assert all(map(np.array_equal, *made))


def test_wrong_settings():
    sizes = (D, H, HV, K, V, W)
    with pytest.raises(ValueError, match=r"`norm` must be one of \('after', 'before', None\); got 'first'"):
        Mamba2Config(*sizes, norm="first")
    with pytest.raises(ValueError, match=r"`multipliers` must be a tuple of 5 numbers; got \[1\]"):
        Mamba2Config(*sizes, multipliers=[1])
    with pytest.raises(ValueError, match="`in_bias` must be True or False"):
        Mamba2Config(*sizes, in_bias=1)
    config = Mamba2Config(*sizes)
    with pytest.raises(ValueError, match=r"no weights that the layer lacks; got \['in_proj.bias'\]"):
        load_mamba2_mixer(checkpoint(config) | {"in_proj.bias": np.zeros(3)}, config)
