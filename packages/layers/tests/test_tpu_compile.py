"""Layers compile for TPUs, and what `jax.checkpoint` repeats of them."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import SingleDeviceSharding

from chunkwise import layers
from chunkwise.pipeline import pool_formats
from chunkwise.shared.chips import CHIPS
from chunkwise.shared.testing.inputs import spec
from chunkwise.shared.testing.tpu import compile_for, has_libtpu, text_for_tpu, topology_mesh
from tests.layer_oracle import LAYERS, SERVED

# The kernels of the operators, which are named after their functions.
KERNELS = {
    "gated_delta_net": "chunk_gated_delta_rule_fwd",
    "gated_delta_net2": "chunk_gdn2_fwd",
    "kimi_delta_attention": "chunk_kda_fwd",
    "mamba2_mixer": "chunk_gla_fwd",
}
THOROUGH = dict(
    test_compiles=lambda name: name not in ("gated_delta_net", "mlstm_layer"),
    test_a_serving_step_compiles=True,
    test_a_pool_in_rows_is_not_copied=lambda ring: ring,
    test_the_policy_spares_a_second_forward=lambda name: name != "gated_delta_net",
)


# Released heads have 64 channels; XLA for tpu7x aborts in the gradient of `r_k` if they have 8.
CONFIGS = {name: layer.config for name, layer in LAYERS.items()}
CONFIGS["rwkv7_attention"] = dataclasses.replace(CONFIGS["rwkv7_attention"], D=256, K=64, V=64)


def shapes(name: str, dtype=jnp.bfloat16):
    """Return the shapes of hidden states and of weights of a layer."""
    config = CONFIGS[name]
    weights = jax.eval_shape(lambda: LAYERS[name].init(jax.random.key(0), config, dtype))
    return spec(1, 256, config.D, dtype=dtype), weights


def loss(name: str, x, weights):
    layer = LAYERS[name]
    return jnp.sum(layer.run(x, weights, CONFIGS[name], implementation="fused")[0].astype(jnp.float32))


@pytest.mark.tpu
@pytest.mark.skipif(not has_libtpu(), reason="needs libtpu")
@pytest.mark.parametrize("chip", CHIPS)
@pytest.mark.parametrize("name", LAYERS)
def test_compiles(name, chip):
    x, weights = shapes(name)
    gradient = jax.value_and_grad(functools.partial(loss, name), argnums=(0, 1))
    assert "tpu_custom_call" in compile_for(gradient, x, weights, chip=chip).as_text()


@pytest.mark.tpu
@pytest.mark.skipif(not has_libtpu(), reason="needs libtpu")
@pytest.mark.parametrize("chip", CHIPS)
@pytest.mark.parametrize("name", SERVED)
def test_a_serving_step_compiles(name, chip):
    (x, weights), layer = shapes(name), LAYERS[name]
    step = lambda x, weights, pool, at: layer.ragged(x, weights, CONFIGS[name], pool, at, implementation="fused")
    at = layers.Step(spec(5, dtype=jnp.int32), spec(4, dtype=jnp.int32), spec(4, dtype=bool), spec(dtype=jnp.int32))
    pool = jax.eval_shape(lambda: layers.empty_cache(CONFIGS[name], 8))
    assert "tpu_custom_call" in compile_for(step, x, weights, pool, at, chip=chip).as_text()


@pytest.mark.parametrize("name", KERNELS)
def test_the_policy_spares_a_second_forward(name):
    """Without it, the backward runs the operator again; with it, only what is around the operator."""
    x, weights = shapes(name)
    counts = []
    for options in (dict(), dict(policy=layers.remat_policy)):
        run = jax.checkpoint(functools.partial(loss, name), **options)
        counts.append(text_for_tpu(jax.value_and_grad(run, argnums=(0, 1)), x, weights).count(KERNELS[name]))
    assert counts[0] == 2 * counts[1] > 0


def test_a_layer_may_recompute_nothing():
    """The states of the operator are then kept, and not made again by a launch of their own."""
    (x, weights), layer = shapes("gated_delta_net"), LAYERS["gated_delta_net"]
    for disabled in (False, True):
        config = dataclasses.replace(layer.config, disable_recompute=disabled)
        run = lambda *args, config=config: layer.run(*args, config, implementation="fused")[0]
        text = text_for_tpu(lambda *args, run=run: jax.vjp(run, *args)[1](args[0]), x, weights)
        assert ("gated_delta_rule_states" not in text) == disabled


@pytest.mark.tpu
@pytest.mark.skipif(not has_libtpu(), reason="needs libtpu")
@pytest.mark.parametrize("ring", [0, 16])
def test_a_pool_in_rows_is_not_copied(ring):
    """In the default layout every step copies the pool of the convolutions, and the gates of rings, there and back."""
    config = layers.GatedDeltaNetConfig(D=128, H=2, HV=4, K=128, V=128)
    weights = jax.eval_shape(lambda: layers.init_gated_delta_net(jax.random.key(0), config, jnp.bfloat16))
    mesh = topology_mesh(CHIPS["v6e"].topology, "x", 1)
    one = SingleDeviceSharding(mesh.devices[0])
    pool = jax.eval_shape(lambda: layers.empty_pool(config, 1024, jnp.bfloat16, replay=ring))
    pool = jax.tree.map(lambda y: jax.ShapeDtypeStruct(y.shape, y.dtype, sharding=one), pool)
    x, at = spec(1, 8, config.D, dtype=jnp.bfloat16), (spec(9, dtype=jnp.int32), spec(8, dtype=jnp.int32))

    def copies(formats):
        def run(x, weights, pool, *at):
            step = layers.Step(*at, num_decodes=8)
            return layers.ragged_gated_delta_net(x, weights, config, pool, step, implementation="fused")

        step = jax.jit(run, donate_argnums=2, in_shardings=(one, one, formats, one, one), out_shardings=(one, formats))
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            text = step.trace(x, weights, pool, *at).lower().compile().as_text()
        assert "decode_layer_fwd" in text
        return re.findall(r"%copy\.\S+ = \w+\[1024,[0-9,]*\]", text)

    assert copies(one)
    assert not copies(pool_formats(pool))
