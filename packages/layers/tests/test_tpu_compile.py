"""Layers compile for TPUs, and what `jax.checkpoint` repeats of them."""

import functools

import jax
import jax.numpy as jnp
import pytest

from chunkwise.layers import Step, empty_cache, remat_policy
from chunkwise.shared.chips import CHIPS
from chunkwise.shared.testing.inputs import spec
from chunkwise.shared.testing.tpu import compile_for, has_libtpu
from chunkwise.shared.testing.transforms import text_for_tpu
from packages.layers.tests.layer_oracle import LAYERS

# The kernels of the operators, which are named after their functions.
KERNELS = {
    "gated_delta_net": "chunk_gated_delta_rule_fwd",
    "gated_delta_net2": "chunk_gdn2_fwd",
    "kimi_delta_attention": "chunk_kda_fwd",
    "mamba2_mixer": "chunk_gla_fwd",
}
THOROUGH = dict(
    test_compiles=lambda name: name != "gated_delta_net",
    test_a_serving_step_compiles=True,
    test_the_policy_spares_a_second_forward=lambda name: name != "gated_delta_net",
)


def shapes(name: str, dtype=jnp.bfloat16):
    """Return the shapes of hidden states and of weights of a layer."""
    config = LAYERS[name].config
    weights = jax.eval_shape(lambda: LAYERS[name].init(jax.random.key(0), config, dtype))
    return spec(1, 256, config.D, dtype=dtype), weights


def loss(name: str, x, weights):
    layer = LAYERS[name]
    return jnp.sum(layer.run(x, weights, layer.config, implementation="fused")[0].astype(jnp.float32))


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
@pytest.mark.parametrize("name", LAYERS)
def test_a_serving_step_compiles(name, chip):
    (x, weights), layer = shapes(name), LAYERS[name]
    step = lambda x, weights, pool, at: layer.ragged(x, weights, layer.config, pool, at, implementation="fused")
    at = Step(spec(5, dtype=jnp.int32), spec(4, dtype=jnp.int32), spec(4, dtype=bool), spec(dtype=jnp.int32))
    pool = jax.eval_shape(lambda: empty_cache(layer.config, 8))
    assert "tpu_custom_call" in compile_for(step, x, weights, pool, at, chip=chip).as_text()


@pytest.mark.parametrize("name", KERNELS)
def test_the_policy_spares_a_second_forward(name):
    """Without it, the backward runs the operator again; with it, only what is around the operator."""
    x, weights = shapes(name)
    counts = []
    for options in (dict(), dict(policy=remat_policy)):
        run = jax.checkpoint(functools.partial(loss, name), **options)
        counts.append(text_for_tpu(jax.value_and_grad(run, argnums=(0, 1)), x, weights).count(KERNELS[name]))
    assert counts[0] == 2 * counts[1] > 0
