"""The mixer of a layer: a serving step of decodes alone is one launch between the projections."""

import dataclasses
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from chunkwise import layers
from chunkwise.layers.mixer import mixing
from chunkwise.shared.call.arguments import Slots
from chunkwise.shared.serving.decode import launch
from chunkwise.shared.testing.compare import assert_close

CONFIGS = {
    "gated_delta_net": layers.GatedDeltaNetConfig(D=32, H=1, HV=2, K=128, V=128, allow_neg_eigval=True),
    "kimi_delta_attention": layers.KimiDeltaAttentionConfig(D=32, H=1, HV=1, K=128, V=128, lower_bound=-5.0),
    # States lie transposed.
    "mamba2_mixer": layers.Mamba2Config(D=32, H=2, HV=8, K=128, V=64, dt_limit=(0.01, 0.6)),
    "lightning_attention": layers.LightningAttentionConfig(D=32, H=2, HV=2, K=128, V=128, layer=1, layers=3),
}
MAMBA = CONFIGS["mamba2_mixer"]
# Mixers of Mamba-2: one group, a norm before the gate, no norm, a narrow state, and a pool of every type.
MIXERS = {
    "bfloat16": (MAMBA, "bfloat16"),
    "one group": (dataclasses.replace(MAMBA, H=1), "float32"),
    "norm before": (dataclasses.replace(MAMBA, norm="before", V=80), "float32"),
    "no norm": (dataclasses.replace(MAMBA, norm=None, conv_bias=False), "float32"),
    "64 by 64": (dataclasses.replace(MAMBA, K=64), "bfloat16"),
    "int8": (MAMBA, "int8"),
    "ring": (MAMBA, "ring"),
}
# The kernel is compared with float64 in `shared`, and layers over devices with those of one.
THOROUGH = dict(
    test_one_launch=lambda name: name not in ("kimi_delta_attention", "lightning_attention"),
    # Compiling takes long; pools of every type are compared in `shared`, too.
    test_mamba2_beside_plain_jax=lambda case: case not in ("norm before", "64 by 64"),
    # Decodes have gradients of their own, and layers too.
    test_a_token_after_a_cache=True, test_drafts_are_one_launch=True,
)  # fmt: skip
SLOTS = jnp.array([3, -1, 0, 2], jnp.int32)


@pytest.fixture(autouse=True)
def few_states_a_step(monkeypatch):
    """Let a grid step take two sequences, so that there are several, and less to compile."""
    monkeypatch.setattr(launch, "_STATES", 4)


def step(name, decodes):
    """Return a function of a pool and the name of an implementation that runs a step, and a pool."""
    config = CONFIGS[name]
    weights = getattr(layers, f"init_{name}")(jax.random.key(0), config)
    lengths = [1] * decodes + [5] * (4 - decodes)
    boundaries = jnp.asarray(np.cumsum([0, *lengths]), jnp.int32)
    x = jax.random.normal(jax.random.key(1), (1, sum(lengths), config.D))
    empty = layers.empty_cache(config, 5, state_dtype=jnp.bfloat16)
    pool = jax.tree.map(lambda y: 0.3 * jax.random.normal(jax.random.key(2), y.shape).astype(y.dtype), empty)

    def run(pool, implementation, decodes):
        told = layers.Step(boundaries, SLOTS, jnp.array([True, True, False, True]), num_decodes=decodes)
        return getattr(layers, f"ragged_{name}")(x, weights, config, pool, told, implementation=implementation)

    return run, pool


@pytest.mark.parametrize("name", CONFIGS)
def test_one_launch(name):
    run, pool = step(name, 4)
    names = lambda implementation: str(jax.make_jaxpr(run, static_argnums=1)(pool, implementation, jnp.int32(4)))
    assert "decode_layer_fwd" in names("fused")
    assert "decode_layer_fwd" not in names("xla")


def test_a_step_with_prefills_is_no_launch(monkeypatch):
    """Where the number of decodes is traced, both ways are in the program."""
    monkeypatch.setattr(mixing.choose, "by_kernel", lambda *_, **__: True)
    monkeypatch.setattr(launch, "launch", lambda *_: jnp.int32(1))
    pool, ends = types.SimpleNamespace(replay=1), jnp.arange(5, dtype=jnp.int32)
    told = lambda n: (None, (), pool, ends, Slots(SLOTS, num_decodes=jnp.int32(n)), "fused", lambda: jnp.int32(0))
    assert [int(mixing.fused_step(*told(n))) for n in (1, 4)] == [0, 1]


@pytest.mark.parametrize("case", MIXERS)
def test_mamba2_beside_plain_jax(case):
    """A step of decodes by one launch, over every pool, and one of a decode and prefills by the kernels."""
    config, kind = MIXERS[case]
    weights = layers.init_mamba2_mixer(jax.random.key(0), config)
    ring = kind == "ring"
    pool = layers.empty_pool(config, 5, replay=2) if ring else layers.empty_pool(config, 5, state_dtype=kind)
    cache = jax.tree.map(
        lambda y: 0.3 * jax.random.normal(jax.random.key(2), y.shape, y.dtype), layers.empty_cache(config, 5)
    )
    pool = layers.write_cache(pool, jnp.arange(5, dtype=jnp.int32), cache)
    for lengths, decodes in (((1, 1, 1, 1), 4), ((1, 5, 5, 5), 1)):
        boundaries = jnp.asarray(np.cumsum([0, *lengths]), jnp.int32)
        x = jax.random.normal(jax.random.key(1), (1, sum(lengths), config.D))

        def run(pool, implementation, x=x, boundaries=boundaries, decodes=decodes):
            told = layers.Step(boundaries, SLOTS, jnp.array([True, True, False, True]), num_decodes=decodes)
            options = dict(decode_tokens=1) if ring else {}
            return layers.ragged_mamba2_mixer(x, weights, config, pool, told, implementation=implementation, **options)

        traced = jax.jit(run, static_argnums=1).trace(pool, "fused")
        assert ("decode_layer_fwd" in str(traced.jaxpr)) == (decodes == 4)
        got, want = (jax.jit(run, static_argnums=1)(pool, each) for each in ("fused", "xla"))
        assert_close("y", got[0], want[0], 1e-5)
        read = lambda found: layers.read_cache(found[1], jnp.arange(5))
        for have, other in zip(*map(jax.tree.leaves, (read(got), read(want))), strict=True):
            assert_close("cache", have, other, dict(bfloat16=4e-3, int8=1e-2).get(kind, 1e-5))


@pytest.mark.parametrize("ring", [True, False])
def test_drafts_are_one_launch(ring):
    """In slots, a state and inputs of the convolutions after every token; the second starts from its second."""
    config = CONFIGS["gated_delta_net"]
    weights = layers.init_gated_delta_net(jax.random.key(0), config)
    empty = layers.empty_pool(config, 5, replay=8, decode_tokens=3) if ring else layers.empty_cache(config, 7)
    pool = jax.tree.map(lambda y: y if ring else 0.3 * jax.random.normal(jax.random.key(2), y.shape), empty)
    slots = SLOTS[::2] if ring else jnp.array([[3, 1, 6], [0, 2, -1]], jnp.int32)
    told = layers.Step(
        jnp.array([0, 3, 5], jnp.int32), slots, num_decodes=2, num_accepted_tokens=jnp.array([1, 1 if ring else 2])
    )

    def run(pool, x, implementation):
        return layers.ragged_gated_delta_net(
            x, weights, config, pool, told, decode_tokens=3 if ring else None, implementation=implementation
        )

    x = jax.random.normal(jax.random.key(1), (1, 5, config.D))
    assert "decode_layer_fwd" in str(jax.make_jaxpr(run, static_argnums=2)(pool, x, "fused"))
    if ring:
        return
    got, want = (jax.jit(run, static_argnums=2)(pool, x, each) for each in ("fused", "xla"))
    for have, other in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert_close("y or pool", have, other, 1e-5)


@pytest.mark.parametrize("name", ["gated_delta_net", "mamba2_mixer", "lightning_attention"])
def test_a_token_after_a_cache(name):
    """Values and gradients of three rows; the gradient is that of the other form."""
    config = CONFIGS[name]
    weights = getattr(layers, f"init_{name}")(jax.random.key(0), config)
    x, cache = jax.random.normal(jax.random.key(1), (3, 1, config.D)), layers.empty_cache(config, 3)
    cache = jax.tree.map(lambda y: 0.3 * jax.random.normal(jax.random.key(2), y.shape, y.dtype), cache)

    def loss(arrays, implementation):
        x, weights, cache = arrays
        layer = getattr(layers, name)
        got = layer(x, weights, config, cache, output_cache=True, implementation=implementation)
        return sum(jnp.sum(jnp.sin(y)) for y in jax.tree.leaves(got)), got

    run = jax.jit(jax.grad(loss, has_aux=True), static_argnums=1)
    got, want = (run((x, weights, cache), each) for each in ("fused", "xla"))
    for have, other in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert_close("gradient or value", have, other, 1e-5)
