"""Ours beside levanter's own functions over named arrays, out of its wheel: `nox -s host-levanter`."""

import functools

import haliax
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from chunkwise.integrations import levanter
from chunkwise.shared.testing.compare import assert_close
from tests_e2e.hosts.host import module_of, on_v6e, path_of

THEIRS = module_of(path_of("marin-levanter", "levanter/layers/gated_deltanet.py"), "gated_deltanet")
FUNCTIONS = ("chunk_gated_delta_rule", "recurrent_gated_delta_rule")
B, T, H, K, V = (
    haliax.Axis(name, size)
    for name, size in (("batch", 2), ("position", 70), ("heads", 3), ("k_head_dim", 16), ("v_head_dim", 8))
)


def inputs(B=B, T=T, H=H, K=K, V=V):
    keys = jax.random.split(jax.random.key(0), 6)
    axes = ((B, T, H, K), (B, T, H, K), (B, T, H, V), (B, T, H))
    q, k, v, g = (haliax.random.normal(key, each) for key, each in zip(keys, axes, strict=False))
    beta = haliax.random.uniform(keys[4], (B, T, H))
    return (q, k, v, -haliax.abs(g), beta), jax.random.normal(keys[5], (B.size, H.size, K.size, V.size))


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("norm", [True, False])
def test_beside(name, norm):
    x, state = inputs()
    options = dict(initial_state=state, output_final_state=True, use_qk_l2norm_in_kernel=norm)
    if not norm:
        x = (x[0], x[1] * 0.1, *x[2:])
    (o, after), (want, states) = (
        jax.jit(lambda x, m=module: getattr(m, name)(*x, **options))(x) for module in (levanter, THEIRS)
    )
    assert {axis.name for axis in o.axes} == {axis.name for axis in want.axes}
    assert_close("o", o.array, np.asarray(want.rearrange(o.axes).array, np.float64), 1e-5)
    assert_close("state", after, np.asarray(states, np.float64), 1e-5)


def loss(module, x):
    o, state = module.chunk_gated_delta_rule(*x[0], initial_state=x[1], output_final_state=True)
    return jnp.sum(jnp.sin(o.array)) + jnp.sum(jnp.sin(state))


def test_gradients():
    gradients = [jax.jit(jax.grad(functools.partial(loss, module)))(inputs()) for module in (THEIRS, levanter)]
    for theirs, ours in zip(*map(jax.tree.leaves, gradients), strict=True):
        assert_close("gradient", ours, np.asarray(theirs, np.float64), 1e-5)


def test_temporaries_on_v6e():
    """What XLA needs besides arguments and results in a forward of 8,192 tokens."""
    axes = B.resize(1), T.resize(8192), H.resize(16), K.resize(128), V.resize(128)
    run = lambda x, module, **options: module.chunk_gated_delta_rule(*x, **options)[0].array
    theirs, ours = (
        functools.partial(run, module=module, **options)
        for module, options in ((THEIRS, {}), (levanter, dict(implementation="fused")))
    )
    found = on_v6e(theirs, ours, jax.eval_shape(lambda: inputs(*axes)[0]))
    assert found["ours"] < found["theirs"]


def test_the_module_stands_in(monkeypatch):
    """What a user changes: two names of levanter's module. Its layer reads a prompt, and then a token."""
    embed = haliax.Axis("embed", 24)
    config = THEIRS.GatedDeltaNetConfig(embed, num_k_heads=2, num_v_heads=4, head_k_dim=16, head_v_dim=8)
    layer = THEIRS.GatedDeltaNet.init(config, key=jax.random.key(0))
    x = haliax.random.normal(jax.random.key(1), (B, T, embed))
    token = haliax.random.normal(jax.random.key(2), (B, T.resize(1), embed))

    def run():
        y, state = layer(x)
        gradient = jax.grad(lambda x: haliax.sum(layer(x)[0]).array)(x)
        return jax.tree.leaves((y, layer(token, decode_state=state), gradient))

    theirs = run()
    for name in FUNCTIONS:
        monkeypatch.setattr(THEIRS, name, getattr(levanter, name))
    for ours, want in zip(run(), theirs, strict=True):
        assert_close("result, state or gradient", ours, np.asarray(want, np.float64), 1e-5)
