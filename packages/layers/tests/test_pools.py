"""Layers over pools of 8 bits and over rings, beside the layers over whole sequences."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from chunkwise import layers
from chunkwise.layers.mixer import running
from chunkwise.shared.testing.compare import assert_close

LAYERS = {
    "gated_delta_net": layers.GatedDeltaNetConfig(D=16, H=1, HV=2, K=8, V=8),
    "gated_delta_net2": layers.GatedDeltaNet2Config(D=16, H=1, HV=2, K=8, V=8),
    "kimi_delta_attention": layers.KimiDeltaAttentionConfig(D=16, H=2, HV=2, K=8, V=8),
    "comba_layer": layers.CombaConfig(D=16, H=1, HV=2, K=8, V=8),
    "mamba2_mixer": layers.Mamba2Config(D=16, H=1, HV=2, K=8, V=8),
    "gated_linear_attention": layers.GatedLinearAttentionConfig(D=16, H=2, HV=2, K=8, V=8),
    # Positions, too, go on from what is kept.
    "lightning_attention": layers.LightningAttentionConfig(D=16, H=2, HV=2, K=8, V=8, frequencies=(1.0, 0.1)),
}
QUICK_CACHES = ("gated_delta_net", "int8", 8), ("mamba2_mixer", "bfloat16", 0)
THOROUGH = dict(
    test_drafts=lambda layer: layer != "gated_delta_net",
    # A request moves between two processes in the tests above the packages.
    test_requests_move=True,
    test_read_and_written=lambda layer, dtype, replay: (layer, dtype, replay) not in QUICK_CACHES,
    # The types differ for one layer with gates per head, and for one with gates per channel.
    test_a_scan_carries_a_cache=lambda layer, cached, dtype: (
        layer not in ("mamba2_mixer", "kimi_delta_attention") and (cached, dtype) != (jnp.float32, jnp.float32)
    ),
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


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize(("cached", "states"), [(jnp.float32, jnp.float16), (jnp.bfloat16, jnp.float32)])
@pytest.mark.parametrize("layer", LAYERS)
def test_a_scan_carries_a_cache(layer, cached, states, dtype):
    """A prompt in pieces of any length inside `lax.scan`, whatever types the hidden states and the cache have."""
    config, run = LAYERS[layer], getattr(layers, layer)
    weights = jax.eval_shape(lambda: getattr(layers, f"init_{layer}")(jax.random.key(0), config))

    def scan(weights, pieces, implementation):
        step = lambda cache, x: run(x, weights, config, cache, True, implementation=implementation)[::-1]
        return jax.lax.scan(step, layers.empty_cache(config, 2, cached, states), pieces)

    for T, each in ((1, "xla"), (1, "fused"), (3, "xla"), (8, "xla")):
        pieces = jax.ShapeDtypeStruct((4, 2, T, config.D), dtype)
        cache, y = jax.eval_shape(functools.partial(scan, implementation=each), weights, pieces)
        assert y.dtype == dtype
        assert cache.state.dtype == states
        assert all(x.dtype == (config.conv_dtype or cached) for x in cache.conv)
        alone = lambda x, w: run(x, w, config, None, True, implementation="xla")
        _, cache = jax.eval_shape(alone, jax.ShapeDtypeStruct((2, T, config.D), dtype), weights)
        assert all(x.dtype == (config.conv_dtype or dtype) for x in cache.conv)
        assert cache.state.dtype == jnp.float32


@pytest.mark.parametrize("T", [1, 5])
@pytest.mark.parametrize("layer", ["gated_delta_net", "mamba2_mixer"])
def test_a_donated_cache_is_updated_in_place(layer, T):
    """All of its arrays, in every type."""
    config = LAYERS[layer]
    weights = jax.eval_shape(lambda: getattr(layers, f"init_{layer}")(jax.random.key(0), config))
    cache = layers.empty_cache(config, 2, jnp.float32, jnp.bfloat16)
    step = jax.jit(lambda x, weights, cache: getattr(layers, layer)(x, weights, config, cache, True), donate_argnums=2)
    text = step.lower(jnp.ones((2, T, config.D)), weights, cache).as_text()
    assert text.count("tf.aliasing_output") == len(jax.tree.leaves(cache))


def test_memory_of_a_sequence():
    """Of Qwen3-Next's layer: a page says 2 MiB, 1 MiB in fewer bits, and 48 KiB for the convolution."""
    config = layers.GatedDeltaNetConfig(D=2048, H=16, HV=32, K=128, V=128)
    sizes = lambda *types: jax.eval_shape(lambda: layers.empty_pool(config, 1, *types))
    bytes_of = lambda tree: sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))
    assert [bytes_of(sizes(jnp.bfloat16, dtype).state) for dtype in (jnp.float32, jnp.bfloat16)] == [2**21, 2**20]
    assert bytes_of(sizes(jnp.bfloat16).conv) == 48 * 2**10


@pytest.mark.parametrize("layer", LAYERS)
def test_requests_move(layer):
    """What a slot holds goes on in the layer, and in a pool of another ring, whatever is accepted of a decode.

    Slot 1 has a prompt of 5 tokens, and a decode of 3 right ones: if some are taken back, the text goes on from there.
    """
    config, weights, x, want = make(layer)
    run, ragged = getattr(layers, layer), getattr(layers, f"ragged_{layer}")
    step = jax.jit(functools.partial(ragged, config=config, implementation="xla"), static_argnames="decode_tokens")
    alone = jax.jit(lambda x, weights, cache: run(x, weights, config, cache, True, implementation="xla"))
    slots, pool = jnp.array([1], jnp.int32), layers.empty_pool(config, SLOTS, replay=8, decode_tokens=U)
    _, pool = step(padded(x[:, :5]), weights, pool=pool, step=told(5, 0, accepted=1), decode_tokens=U)
    # After a prefill the number is not read.
    caches = {5: layers.read_cache(pool, slots, jnp.array([99], jnp.int32))}
    _, pool = step(padded(x[:, 5:8]), weights, pool=pool, step=told(3, 1, accepted=1), decode_tokens=U)
    caches |= {5 + k: jax.jit(layers.read_cache)(pool, slots, jnp.array([k], jnp.int32)) for k in (1, 2, 3)}
    for a, b in zip(jax.tree.leaves(layers.read_cache(pool, slots)), jax.tree.leaves(caches[8]), strict=True):
        assert_close("all are kept", a, b, 1e-6)
    for place, cache in caches.items():
        y, after = alone(x[:, place : place + 3], weights, cache)
        assert_close("y", y, want[:, place : place + 3], 1e-4)
        # What was in the slot, and in its ring, is gone.
        other = spoilt(layers.empty_pool(config, SLOTS, replay=5, decode_tokens=2))
        one = dict(pool=layers.write_cache(other, slots, cache), step=told(1, 1, accepted=2), decode_tokens=2)
        y, _ = step(padded(x[:, place : place + 1]), weights, **one)
        assert_close("y", y[:, :1], want[:, place : place + 1], 1e-4)
    # And back: what the layer leaves goes on in the first pool.
    pool = layers.write_cache(pool, slots, after)
    y, _ = step(padded(x[:, 11:14]), weights, pool=pool, step=told(3, 1, accepted=3), decode_tokens=U)
    assert_close("y", y[:, :3], want[:, 11:14], 1e-4)


def test_what_a_convolution_keeps_after_a_block_over_a_ring():
    """The last inputs of the block, in the first of the slots that belong to a slot of the states."""
    pool = layers.empty_pool(LAYERS["gated_delta_net"], SLOTS, replay=8, decode_tokens=U)
    step = told(80, 0, accepted=1)._replace(num_decodes=0, block_state_indices=np.array([[2]], np.int32))
    x, run = jax.random.normal(jax.random.key(1), (1, 80, 8)), running.Serving(pool, step, 64, U, "xla", None)
    np.testing.assert_array_equal(run.convolve(0, x, jnp.ones((8, 4)), None, 1)[1][2 * U], x[0, 61:64])


def spoilt(pool):
    """Return a pool with NaN and numbers of no sense in slot 1, which is in the middle."""
    fill = lambda x: jnp.nan if jnp.issubdtype(x.dtype, jnp.floating) else 3
    return jax.tree.map(lambda x: x.at[x.shape[0] // 3 : 2 * x.shape[0] // 3].set(fill(x)), pool)


# The largest error of a state that is rounded once, over its largest entry.
ROUNDING = {"float32": 0.0, "bfloat16": 2**-8, "float16": 2**-11, "int8": 0.5 / 127 * 1.01}


@pytest.mark.parametrize("replay", [0, 8])
@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize("layer", LAYERS)
def test_read_and_written(layer, dtype, replay):
    """A cache goes into a pool of any type and comes out; slots may repeat, and some do not exist."""
    config, rng = LAYERS[layer], np.random.default_rng(0)
    draw = lambda x: jnp.asarray(rng.standard_normal(x.shape), x.dtype)
    cache = jax.tree.map(draw, layers.empty_cache(config, 4, jnp.bfloat16))
    empty = layers.empty_pool(config, SLOTS, jnp.bfloat16, dtype, replay=replay, decode_tokens=U)
    pool = layers.write_cache(empty, jnp.array([2, -1, 0, SLOTS], jnp.int32), jax.tree.map(np.asarray, cache))
    assert jax.tree.structure(pool) == jax.tree.structure(empty)
    assert [x.dtype for x in jax.tree.leaves(pool)] == [x.dtype for x in jax.tree.leaves(empty)]
    got = layers.read_cache(pool, jnp.array([0, 2, 1, SLOTS, -1, 2**31 - 1, 2], jnp.int32))
    for name, x, y in zip(("state", *"qkv"), (got.state, *got.conv), (cache.state, *cache.conv), strict=False):
        x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
        limit = ROUNDING[dtype] * np.abs(y).max() if name == "state" else 0.0
        np.testing.assert_allclose(x[[0, 1, 6]], y[[2, 0, 0]], rtol=0, atol=limit, err_msg=name)
        assert not x[2:6].any()
    into = layers.write_cache(layers.empty_cache(config, SLOTS), jnp.array([1], jnp.int32), layers.read_cache(
        pool, jnp.array([2], jnp.int32)))  # fmt: skip
    assert not isinstance(into.state, type(pool.state))
    np.testing.assert_array_equal(into.state[1], got.state[1])


def with_conv(cache, shape):
    """Return a cache with another first array of convolutions."""
    return cache._replace(conv=(jnp.zeros(shape), *cache.conv[1:]))


def test_wrong_moves():
    """Each error says what is wrong in the words of the call."""
    config = LAYERS["gated_delta_net"]
    pool, slots = layers.empty_pool(config, SLOTS, replay=8, decode_tokens=U), jnp.zeros(2, jnp.int32)
    cache = layers.empty_cache(config, 2)
    read, write = layers.read_cache, layers.write_cache
    for message, call, *arguments in (
        ("`pool` must be a Cache; got StatePool.", read, pool.state, slots),
        ("`slots` must be int32 of shape [n]; got float32 (2,).", read, pool, slots * 1.0),
        ("`num_accepted_tokens` must be int32 of shape [n]; got int.", read, pool, slots, 1),
        ("`pool.conv[0]` must have 3 slots times `decode_tokens`; got 10.", read, with_conv(pool, (10, 3, 8)), slots),
        ("`cache` must be a Cache; got ArrayImpl.", write, pool, slots, cache.state),
        ("`cache.state` must be an array [n, HV, K, V]; got StatePool.", write, pool, slots, pool),
        ("`cache.state` must have shape [n, HV, K, V] = (1, 2, 8, 8)", write, pool, slots[:1], cache),
        ("`cache.conv` must have 3 arrays; got 0.", write, pool, slots, cache._replace(conv=())),
        ("`cache.conv[0]` must have shape [N, W-1, C] = (2, 3, 8)", write, pool, slots, with_conv(cache, (2, 3, 9))),
    ):
        with pytest.raises(ValueError, match=re.escape(message)):
            call(*arguments)
    weights, x = make("gated_delta_net")[1:3]
    message = "`decode_tokens` must be at most 3, the number that `empty_pool` made `pool` for; got 4."
    with pytest.raises(ValueError, match=re.escape(message)):
        layers.ragged_gated_delta_net(x, weights, config, pool, told(3, 1, accepted=1), decode_tokens=4)
