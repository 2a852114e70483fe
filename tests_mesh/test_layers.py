"""Layers over meshes of devices do what they do on one: rows, tokens and heads divided, and what they send."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding

from chunkwise.layers import (
    GatedDeltaNetConfig,
    KimiDeltaAttentionConfig,
    LightningAttentionConfig,
    Mamba2Config,
    Step,
    empty_cache,
    gated_delta_net,
    init_gated_delta_net,
    init_kimi_delta_attention,
    init_lightning_attention,
    init_mamba2_mixer,
    kimi_delta_attention,
    lightning_attention,
    mamba2_mixer,
    ragged_gated_delta_net,
    shardings,
)
from chunkwise.shared.testing import assert_close
from meshes import P, collectives, make_mesh

SIZES = dict(D=16, H=4, HV=4, K=8, V=8)
LAYERS = {
    "gated_delta_net": (GatedDeltaNetConfig(**SIZES | dict(H=2)), init_gated_delta_net, gated_delta_net),
    "kimi_delta_attention": (KimiDeltaAttentionConfig(**SIZES, R=4), init_kimi_delta_attention, kimi_delta_attention),
    # One group: its norm is a mean over all devices of heads.
    "mamba2_mixer": (Mamba2Config(**SIZES | dict(H=1)), init_mamba2_mixer, mamba2_mixer),
    "mamba2_mixer_groups": (Mamba2Config(**SIZES), init_mamba2_mixer, mamba2_mixer),
    "lightning_attention": (LightningAttentionConfig(**SIZES), init_lightning_attention, lightning_attention),
}
T = 24
IDS = jnp.asarray([[*[0] * 9, *[1] * 10, *[2] * 5], [*[3] * 17, *[-1] * 7]], jnp.int32)


def inputs(config, init):
    x = jax.random.normal(jax.random.key(1), (2, T, config.D))
    return x, jax.jit(lambda: init(jax.random.key(0), config))()


def placed(mesh, values, specs):
    """Return a tree of arrays where a tree of PartitionSpecs says."""
    return jax.tree.map(lambda x, spec: jax.device_put(x, NamedSharding(mesh, spec)), values, specs)


def loss(layer, config, sharding, x, weights, segment_ids):
    y, _ = layer(x, weights, config, segment_ids=segment_ids, sharding=sharding)
    return jnp.sum(jnp.sin(y)), y


def cases(names, *quick):
    """Run a test for layers under both modes; only some are quick enough for every change."""
    return pytest.mark.parametrize(
        ("name", "mode"),
        [
            pytest.param(name, mode, marks=[] if (name, mode) in quick else pytest.mark.thorough)
            for name in names
            for mode in ("explicit", "automatic")
        ],
    )


@cases(LAYERS, ("gated_delta_net", "automatic"), ("mamba2_mixer_groups", "explicit"))
def test_rows_tokens_and_heads(name, mode):
    """Outputs and all gradients over 2 x 2 x 2 devices are those of one device, with documents across devices."""
    config, init, layer = LAYERS[name]
    x, weights = inputs(config, init)
    run = jax.value_and_grad(functools.partial(loss, layer, config, None), argnums=(0, 1), has_aux=True)
    (_, wanted), gradients = jax.jit(run)(x, weights, IDS)

    mesh = make_mesh((2, 2, 2), mode)
    on = shardings(config, {"batch": "a", "tokens": "b", "heads": "c"}, mesh)
    sharding = NamedSharding(mesh, on.values) if mode == "automatic" else None
    run = jax.value_and_grad(functools.partial(loss, layer, config, sharding), argnums=(0, 1), has_aux=True)
    put = placed(mesh, (x, weights, IDS), (on.x, on.weights, P("a", "b")))
    with jax.set_mesh(mesh):
        (_, y), got = jax.jit(run)(*put)
    assert y.sharding.spec[:2] == ("a", "b")
    assert_close("y", y, wanted, 1e-5)
    for (path, a), b in zip(jax.tree.leaves_with_path(got), jax.tree.leaves(gradients), strict=True):
        assert_close(jax.tree_util.keystr(path), a, b, 2e-5)


@cases(["gated_delta_net", "mamba2_mixer"], ("gated_delta_net", "explicit"))
def test_heads_send_one_sum(name, mode):
    """Tensor parallelism: a forward sums what the last product makes, and the mean of a norm over all heads."""
    config, init, layer = LAYERS[name]
    x, weights = inputs(config, init)
    mesh = make_mesh((4,), mode)
    # Four devices share value heads, which there are four of; fewer key heads are repeated.
    on = shardings(config, {"heads": "a"}, mesh)
    sharding = NamedSharding(mesh, on.values) if mode == "automatic" else None
    put = placed(mesh, (x, weights), (on.x, on.weights))
    with jax.set_mesh(mesh):
        program = jax.jit(lambda x, weights: layer(x, weights, config, sharding=sharding)[0]).lower(*put).compile()
        y = program(*put)
    sums = 2 if name == "mamba2_mixer" else 1
    assert collectives(program.as_text()) == ["all-reduce"] * sums
    assert_close("y", y, layer(x, weights, config)[0], 1e-5)


def test_a_serving_step():
    """The pool of a layer is divided by heads, and a step sends one sum."""
    config = GatedDeltaNetConfig(**SIZES)
    x, weights = inputs(config, init_gated_delta_net)
    pool, mesh = empty_cache(config, 5), make_mesh((4,), "automatic")
    on = shardings(config, {"heads": "a"})
    at = Step(np.array([0, 1, T], np.int32), np.array([3, 1], np.int32), np.array([False, False]), np.int32(1))

    def step(x, weights, pool, at, sharding=None):
        return ragged_gated_delta_net(x, weights, config, pool, at, sharding=sharding)

    wanted = jax.jit(step)(x[:1], weights, pool, at)
    put = placed(mesh, (x[:1], weights, pool), (on.x, on.weights, on.cache))
    with jax.set_mesh(mesh):
        run = functools.partial(step, sharding=NamedSharding(mesh, on.values))
        program = jax.jit(run).lower(*put, at).compile()
        got = program(*put, at)
    assert collectives(program.as_text()) == ["all-reduce"]
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)
