"""How many of our functions stand between a call of the user and the launch of a kernel, and how many launches."""

import jax
import jax.numpy as jnp
import pytest

from chunkwise import pipeline
from chunkwise.layers import (
    GatedDeltaNetConfig,
    Step,
    empty_cache,
    empty_pool,
    gated_delta_net,
    init_gated_delta_net,
    ragged_gated_delta_net,
)
from chunkwise.shared.testing.inputs import make_inputs
from tests.traced import assert_frames, frames_of_launches

CONFIG = GatedDeltaNetConfig(D=32, H=1, HV=2, K=16, V=16)
SERVED = GatedDeltaNetConfig(D=32, H=1, HV=2, K=128, V=128)
DECODES = dict(cu_seqlens=jnp.arange(4, dtype=jnp.int32), state_indices=jnp.arange(3, dtype=jnp.int32))


@pytest.mark.parametrize("name", ["gated_delta_rule", "kda", "gla", "simple_gla"])
def test_operators(name):
    x = make_inputs(1, 32, 1, 2, 16, 16, per_channel=name in ("kda", "gla"))
    x = {name: y for name, y in x.items() if name != "beta"} if "gla" in name else x
    assert_frames(lambda: getattr(pipeline, f"chunk_{name}")(**x, implementation="fused"), most=8)


@pytest.mark.parametrize(("name", "launches"), [("gated_delta_rule", 4), ("gla", 3)])
def test_a_gradient_traces_every_kernel_once(name, launches):
    """The forward with residuals and without, the backward, and in the gated delta rule what the backward recomputes.

    The same trace serves a TPU and interpretation, and no kernel is traced for shapes alone.
    """
    x = make_inputs(1, 32, 1, 2, 16, 16, per_channel=name == "gla")
    x = {name: y for name, y in x.items() if name != "beta"} if name == "gla" else x
    loss = lambda x: jnp.sum(getattr(pipeline, f"chunk_{name}")(**x, implementation="fused")[0])
    frames = frames_of_launches(lambda: jax.grad(loss)(x))
    assert len(frames) == launches
    assert len(max(frames, key=len)) <= 9
    assert all(len(names) <= 4 for names in frames if names[0] == "_backward")


def test_a_layer():
    weights = init_gated_delta_net(jax.random.key(0), CONFIG)
    x = jnp.ones((1, 32, 32))
    assert_frames(lambda: gated_delta_net(x, weights, CONFIG, implementation="fused"), most=12)


@pytest.mark.parametrize("K", [16, 128])
def test_a_few_tokens(K):
    """By either kernel for states without rings."""
    x = make_inputs(3, 1, 1, 2, K, K)
    assert_frames(lambda: pipeline.recurrent_gated_delta_rule(**x, implementation="fused"), most=8)


@pytest.mark.parametrize(("K", "replay"), [(16, 0), (128, 0), (16, 4)])
def test_a_serving_step(K, replay):
    """Its decodes, by each of the kernels, and its prefills."""
    x, pool = make_inputs(1, 32, 1, 2, K, K), pipeline.make_pool(4, 2, K, K, H=1, replay=replay)
    step = lambda: pipeline.ragged_gated_delta_rule(
        **x, states=pool, **DECODES, num_decodes=jnp.int32(2), implementation="fused"
    )
    assert_frames(step, most=9)


def test_the_serving_step_of_a_layer():
    """In one launch, and in the branch for steps with prefills."""
    weights, pool = init_gated_delta_net(jax.random.key(0), SERVED), empty_pool(SERVED, 4)
    step = Step(**DECODES, num_decodes=jnp.int32(2))
    frames = frames_of_launches(
        lambda: ragged_gated_delta_net(jnp.ones((1, 32, 32)), weights, SERVED, pool, step, implementation="fused")
    )
    together = [names for names in frames if "by_operators" not in names]
    assert {len(names) for names in together} == {7}
    assert len(max(frames, key=len)) <= 16, max(frames, key=len)


def test_the_token_of_a_layer():
    weights, cache = init_gated_delta_net(jax.random.key(0), SERVED), empty_cache(SERVED, 3)
    x = jnp.ones((3, 1, 32))
    assert_frames(lambda: gated_delta_net(x, weights, SERVED, cache, True, implementation="fused"), most=8)
