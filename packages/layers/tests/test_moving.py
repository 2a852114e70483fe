"""A cache as bytes: it comes back to the bit, and every change on the way is refused. Slots of pools are named once."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from chunkwise import layers
from chunkwise.pipeline import make_pool, read_states, write_states

CONFIG = layers.GatedDeltaNetConfig(D=8, H=1, HV=2, K=4, V=4)
CONFIGS = [
    CONFIG, layers.KimiDeltaAttentionConfig(8, 2, 2, 4, 4, R=4), layers.Mamba2Config(8, 1, 2, 4, 8),
    layers.LightningAttentionConfig(8, 2, 2, 4, 4, layer=1, layers=4), layers.MlstmLayerConfig(8, 2, 2, 4, 8),
    layers.GatedDeltaProductConfig(8, 1, 2, 4, 8), layers.Rwkv7AttentionConfig(8, 2, 2, 4, 4),
]  # fmt: skip


def filled(config) -> layers.Cache:
    """Return a cache in which no number is like another one."""
    draw = np.random.default_rng(0).standard_normal
    return jax.tree.map(lambda x: draw(x.shape).astype(x.dtype), layers.empty_cache(config, 2, jnp.bfloat16))


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: type(config).__name__)
def test_to_the_bit(config):
    cache = filled(config)
    back = layers.cache_from_bytes(layers.cache_to_bytes(cache, config), config)
    assert jax.tree.structure(back) == jax.tree.structure(cache)
    for x, y in zip(jax.tree.leaves(back), jax.tree.leaves(cache), strict=True):
        assert x.dtype == y.dtype
        np.testing.assert_array_equal(x, y)
    if isinstance(config, layers.MlstmLayerConfig):
        with pytest.raises(NotImplementedError, match="`config` must be of a layer whose state is one array"):
            layers.empty_pool(config, 3)
        return
    if isinstance(config, layers.GatedDeltaProductConfig | layers.Rwkv7AttentionConfig):
        with pytest.raises(NotImplementedError, match="`replay` must be 0 for a layer of which a token is several"):
            layers.empty_pool(config, 3, replay=8)
    pool = layers.write_cache(layers.empty_pool(config, 3, jnp.bfloat16), np.array([2, 0]), back)
    np.testing.assert_array_equal(layers.read_cache(pool, np.array([2])).state[0], cache.state[0])


def test_no_changed_bit_is_taken():
    data = layers.cache_to_bytes(filled(CONFIG), CONFIG)
    draw = np.random.default_rng(0)
    for place in [*range(24), *draw.integers(0, len(data), 200), len(data) - 1]:
        wrong = bytearray(data)
        wrong[place] ^= 1 << draw.integers(8)
        with pytest.raises(ValueError, match="`data` must be "):
            layers.cache_from_bytes(bytes(wrong), CONFIG)
    for wrong in (b"", data[:-1], data[:40], data + b"x", data[1:], data + data):
        with pytest.raises(ValueError, match="`data` must be "):
            layers.cache_from_bytes(wrong, CONFIG)
    with pytest.raises(ValueError, match="`data` must be bytes; got list"):
        layers.cache_from_bytes([data], CONFIG)
    for version in (0, 2):
        with pytest.raises(ValueError, match=f"`data` must be of version 1 of the format; got version {version}"):
            layers.cache_from_bytes(data.replace(b"cache\x01", b"cache" + bytes([version]), 1), CONFIG)


def test_other_sizes():
    data = layers.cache_to_bytes(filled(CONFIG), CONFIG)
    for change in (dict(K=2, V=8), dict(eps=1e-5), dict(D=16)):
        with pytest.raises(ValueError, match=rf"`config` must be that of the machine .*'{next(iter(change))}'"):
            layers.cache_from_bytes(data, dataclasses.replace(CONFIG, **change))
    with pytest.raises(ValueError, match=r"`config` must be that of the machine .*'layer'"):
        layers.cache_from_bytes(data, CONFIGS[1])
    with pytest.raises(ValueError, match=r"`cache.conv\[0\]` must have shape"):
        layers.cache_to_bytes(filled(CONFIGS[1]), CONFIG)
    with pytest.raises(ValueError, match="`cache` must be a Cache; got list"):
        layers.cache_to_bytes([1], CONFIG)


# What the slots of a call are for.
CALLS = {
    "write_cache": lambda slots: layers.write_cache(
        layers.empty_pool(CONFIG, 4), slots, layers.empty_cache(CONFIG, len(slots))
    ),
    "write_states": lambda slots: write_states(make_pool(4, 2, 4, 4), slots, jnp.ones((len(slots), 2, 4, 4))),
    "read_cache": lambda slots: layers.read_cache(layers.empty_pool(CONFIG, 4), slots),
    "read_states": lambda slots: read_states(make_pool(4, 2, 4, 4), slots),
}


@pytest.mark.parametrize("name", CALLS)
def test_slots(name):
    """Slots of numpy are of 64 bits; slots that do not exist may repeat, and others where nothing is written."""
    same = lambda x, y: jax.tree.map(np.testing.assert_array_equal, x, y)
    call = CALLS[name]
    same(call(np.array([1, -1, 9, -1, 9])), call(jnp.array([1, -1, 9, -1, 9], jnp.int32)))
    with pytest.raises(ValueError, match=r"`slots` must be int32 of shape \[n\]; got int64"):
        call(np.array([2**40]))
    for slots in (np.array([1, 0, 1]), jnp.array([1, 0, 1], jnp.int32)):
        if name.startswith("read"):
            call(slots)
        else:
            with pytest.raises(ValueError, match="`slots` must name a slot only once, but for negative ones; got 1"):
                call(slots)
    jax.jit(call)(jnp.array([1, 0, 1], jnp.int32))
