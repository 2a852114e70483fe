"""The settings of Mamba-2's mixer in which hybrid models differ, from a checkpoint, against the recurrence in numpy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from chunkwise.layers import Mamba2Config, init_mamba2_mixer, load_mamba2_mixer, mamba2_mixer, shardings
from chunkwise.shared.testing.compare import assert_close

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


def silu(x):
    return x / (1 + np.exp(-x))


def normed(o, weight, eps):
    groups = o.reshape(T, H, -1)
    return weight * (groups / np.sqrt(np.mean(groups**2, axis=-1, keepdims=True) + eps)).reshape(T, -1)


def reference(named, c: Mamba2Config, x):
    """The mixer of one row x [T, D] as Falcon-H1 has it."""
    w = {name: y.astype(np.float64) for name, y in named.items()}
    sizes = [HV * V, HV * V, H * K, H * K, HV]
    projected = (x * c.in_multiplier) @ w["in_proj.weight"].T + w.get("in_proj.bias", 0)
    projected = projected * np.repeat(c.multipliers, sizes)
    z, u, dt = np.split(projected, [HV * V, HV * V + CHANNELS], axis=1)
    padded = np.concatenate([np.zeros((W - 1, CHANNELS)), u])
    u = sum(padded[i : i + T] * w["conv1d.weight"][:, 0, i] for i in range(W)) + w.get("conv1d.bias", 0)
    v, k, q = np.split(silu(u), [HV * V, HV * V + H * K], axis=1)
    v, k, q = v.reshape(T, HV, V), *(np.repeat(y.reshape(T, H, K), HV // H, axis=1) for y in (k, q))
    dt = np.log1p(np.exp(dt + w["dt_bias"]))
    state, o = np.zeros((HV, K, V)), np.zeros((T, HV, V))
    for t in range(T):
        state = np.exp(-np.exp(w["A_log"]) * dt[t])[:, None, None] * state
        state += k[t][:, :, None] * (dt[t][:, None] * v[t])[:, None]
        o[t] = np.einsum("hkv,hk->hv", state, q[t]) + w["D"][:, None] * v[t]
    o = o.reshape(T, -1)
    if c.norm == "after":
        o = normed(o * silu(z), w["norm.weight"], c.eps)
    elif c.norm == "before":
        o = normed(o, w["norm.weight"], c.eps) * silu(z)
    else:
        o = o * silu(z)
    return o @ w["out_proj.weight"].T + w.get("out_proj.bias", 0)


@pytest.mark.parametrize("name", CONFIGS)
def test_settings(name):
    config = Mamba2Config(D, H, HV, K, V, W, **CONFIGS[name])
    named, x = checkpoint(config), np.random.default_rng(1).standard_normal((1, T, D), np.float32)
    weights = load_mamba2_mixer(named, config)
    y, _ = jax.jit(lambda x, weights: mamba2_mixer(x, weights, config))(x, weights)
    assert_close("y", y[0], reference(named, config, x[0].astype(np.float64)), 1e-5)
    made = jax.eval_shape(lambda: init_mamba2_mixer(jax.random.key(0), config))
    assert jax.tree.map(jnp.shape, made) == jax.tree.map(jnp.shape, weights)
    assert jax.tree.structure(shardings(config, {}).weights) == jax.tree.structure(made)


def test_random_weights_obey_the_multipliers():
    """They are of the size of a checkpoint's weights, which the layer multiplies."""
    plain, scaled = (Mamba2Config(D, H, HV, K, V, W, norm=None, **change) for change in ({}, SCALED))
    weights = init_mamba2_mixer(jax.random.key(0), scaled)
    assert all(map(np.array_equal, weights[:5], init_mamba2_mixer(jax.random.key(0), plain)[:5]))
    z, v, k, q, dt = (0.5 * factor for factor in SCALED["multipliers"])
    folded = weights._replace(q=weights.q * q, k=weights.k * k, v=weights.v * v, z=weights.z * z, dt=weights.dt * dt)
    x = jax.random.normal(jax.random.key(1), (1, T, D))
    y, _ = mamba2_mixer(x, weights, scaled, implementation="xla")
    expected, _ = mamba2_mixer(x, folded, plain, implementation="xla")
    assert_close("y", y, expected, 1e-5)


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
