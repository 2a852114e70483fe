"""How many of our functions stand between a call of the user and the launch of a kernel, and how many launches."""

import jax
import jax.numpy as jnp
import pytest

from chunkwise import pipeline
from chunkwise.layers import GatedDeltaNetConfig, gated_delta_net, init_gated_delta_net
from chunkwise.shared.testing.inputs import make_inputs
from chunkwise.shared.testing.traced import assert_frames, frames_of_launches

CONFIG = GatedDeltaNetConfig(D=32, H=1, HV=2, K=16, V=16)


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
    assert len(frames_of_launches(lambda: jax.grad(loss)(x))) == launches


def test_a_layer():
    weights = init_gated_delta_net(jax.random.key(0), CONFIG)
    x = jnp.ones((1, 32, 32))
    assert_frames(lambda: gated_delta_net(x, weights, CONFIG, implementation="fused"), most=12)
