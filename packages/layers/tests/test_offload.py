"""What a layer keeps lies on the host under `offload_policy`, and gradients are those of `remat_policy`."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from chunkwise.layers import offload_policy, remat_policy
from tests.layer_oracle import LAYERS, make

THOROUGH = dict(test_offload=lambda name: name != "lightning_attention")


@pytest.mark.parametrize("name", LAYERS)
def test_offload(name):
    (x, w), layer = make(name, B=1), LAYERS[name]

    def block(x, w):
        return x + layer.run(x, w, layer.config, implementation="xla")[0]

    def loss(policy, x, w):
        return jnp.sum(jax.checkpoint(block, policy=policy)(x, w) ** 2)

    kept = {}
    for policy_name, policy in (("offload", offload_policy()), ("remat", remat_policy)):
        pull = lambda x, w, policy=policy: jax.vjp(functools.partial(loss, policy), x, w)[1]
        kept[policy_name] = jax.make_jaxpr(pull)(x, w).out_avals
    on_host = [y.memory_space == jax.memory.Space.Host for y in kept["offload"]]
    shapes = {policy_name: sorted(y.shape for y in avals) for policy_name, avals in kept.items()}
    assert shapes["offload"] == shapes["remat"]
    inputs = {np.shape(y) for y in jax.tree.leaves((x, w))}
    for y, host in zip(kept["offload"], on_host, strict=True):
        assert host or y.shape in inputs | {()}, y
    assert sum(on_host) >= 4
    gradients = [jax.jit(jax.grad(functools.partial(loss, p), (0, 1)))(x, w) for p in (offload_policy(), remat_policy)]
    jax.tree.map(np.testing.assert_array_equal, *gradients)
