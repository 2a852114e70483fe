"""Layers over pools of 8 bits and over rings, beside the layers over whole sequences."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from chunkwise import layers
from chunkwise.shared.testing.compare import assert_close

LAYERS = {
    "gated_delta_net": layers.GatedDeltaNetConfig(D=16, H=1, HV=2, K=8, V=8),
    "gated_delta_net2": layers.GatedDeltaNet2Config(D=16, H=1, HV=2, K=8, V=8),
    "kimi_delta_attention": layers.KimiDeltaAttentionConfig(D=16, H=2, HV=2, K=8, V=8),
    "mamba2_mixer": layers.Mamba2Config(D=16, H=1, HV=2, K=8, V=8),
    "lightning_attention": layers.LightningAttentionConfig(D=16, H=2, HV=2, K=8, V=8),
}
THOROUGH = dict(
    # Lightning attention has constant gates in the place of an array.
    test_drafts=lambda layer: layer not in ("gated_delta_net", "lightning_attention"),
    test_types=lambda layer, dtype: (layer, dtype) != ("kimi_delta_attention", "int8"),
)
SLOTS, T, U = 3, 24, 3


def make(layer: str):
    """Return the weights of a layer, its tokens [1, T, D], and what it makes of them as a whole."""
    config = LAYERS[layer]
    weights = getattr(layers, f"init_{layer}")(jax.random.key(0), config)
    x = jax.random.normal(jax.random.key(1), (1, T, config.D))
    return config, weights, x, getattr(layers, layer)(x, weights, config)[0]


@pytest.mark.parametrize("layer", LAYERS)
def test_drafts(layer):
    """A prompt of 5 tokens, and drafts of which some are taken back: outputs are those of the whole text."""
    config, weights, x, want = make(layer)
    pool = layers.empty_pool(config, SLOTS, replay=8, decode_tokens=U)
    step = jax.jit(
        functools.partial(getattr(layers, f"ragged_{layer}"), config=config, decode_tokens=U, implementation="xla"),
        donate_argnames="pool",
    )
    rng, place, kept = np.random.default_rng(2), 0, 5
    y, pool = step(padded(x[:, :5]), weights, pool=pool, step=told(5, 0, accepted=1))
    assert_close("y", y[:, :5], want[:, :5], 1e-4)
    while place + kept < T:
        place += kept
        right = min(int(rng.integers(1, U + 1)), T - place)
        wrong = jnp.asarray(rng.standard_normal((1, U - right, config.D)), jnp.float32)
        tokens = padded(jnp.concatenate([x[:, place : place + right], wrong], axis=1))
        y, pool = step(tokens, weights, pool=pool, step=told(U, 1, accepted=kept))
        assert_close("y", y[:, :right], want[:, place : place + right], 1e-4)
        kept = right


def padded(x):
    """Return tokens [1, 5, D], those past the last one NaN."""
    return jnp.pad(x, [(0, 0), (0, 5 - x.shape[1]), (0, 0)], constant_values=jnp.nan)


def told(tokens: int, decodes: int, accepted: int) -> layers.Step:
    """Return a step of one sequence in slot 1."""
    return layers.Step(
        cu_seqlens=np.array([0, tokens], np.int32), state_indices=np.array([1], np.int32),
        has_initial_state=np.array([decodes > 0]), num_decodes=np.int32(decodes),
        num_accepted_tokens=np.array([accepted], np.int32),
    )  # fmt: skip


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("layer", LAYERS)
def test_types(layer, dtype):
    """States in fewer bits, without a ring: outputs are near."""
    config, weights, x, want = make(layer)
    pool = layers.empty_pool(config, SLOTS, state_dtype=dtype)
    step = jax.jit(functools.partial(getattr(layers, f"ragged_{layer}"), config=config, implementation="xla"))
    y, pool = step(x, weights, pool=pool, step=told(8, 0, accepted=1))
    for t in range(8, T):
        one = x.at[:, 1:].set(jnp.nan).at[:, 0].set(x[:, t])
        y, pool = step(one, weights, pool=pool, step=told(1, 1, accepted=1))
        assert_close("y", y[:, :1], want[:, t : t + 1], {"float32": 1e-4, "bfloat16": 3e-2, "int8": 1e-1}[dtype])
