"""Operators by composition on meshes: results as on one device, which their packages compare with float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding

from chunkwise.pipeline import chunk_dplr_delta_rule, chunk_gated_delta_product, chunk_mamba2
from chunkwise.shared.testing.compare import assert_close
from chunkwise.shared.testing.inputs import (
    make_dplr_inputs,
    make_mamba2_inputs,
    make_product_inputs,
    poison_padding,
)
from tests_e2e.mesh.meshes import P, make_mesh

THOROUGH = dict(
    test_divisions=lambda kind, mode, spec: kind == "dplr" or (mode, spec) != ("explicit", P("a", None, "c")),
    test_context_axis=lambda kind: kind == "dplr",
)
SIZES = B, T, H, HV, K, V = 2, 24, 2, 4, 8, 8


KINDS = {
    "delta_product": (functools.partial(chunk_gated_delta_product, num_householder=2), make_product_inputs),
    "dplr": (chunk_dplr_delta_rule, make_dplr_inputs),
    "mamba2": (functools.partial(chunk_mamba2, dt_softplus=True), make_mamba2_inputs),
}
# How the tensors are split where v is split over rows "a", tokens "b", and value heads "c".
DIMENSIONS = {"v": "abc", "g": "abc", "beta": "abc", "gk": "abc", "initial_state": "ac"}
DIMENSIONS |= {"x": "abc", "z": "abc", "dt": "abc", "A": "c", "D": "c", "dt_bias": "c"}


def results(call, x, fixed, **options):
    """Return the output, the final state, and all gradients of a number made of both."""

    def loss(x):
        o, state = call(**x, **fixed, output_final_state=True, **options)
        return jnp.sum(jnp.sin(o)) + jnp.sum(jnp.cos(state)), (o, state)

    (_, found), gradients = jax.value_and_grad(loss, has_aux=True)(x)
    return found, gradients


@pytest.mark.parametrize("spec", [P("a", None, "c"), P(None, "b")])
@pytest.mark.parametrize("mode", ["automatic", "explicit"])
@pytest.mark.parametrize("kind", KINDS)
def test_divisions(kind, mode, spec):
    call, make = KINDS[kind]
    x, mesh = make(*SIZES, num_states=2), make_mesh((2, 2, 2), mode)
    want = jax.jit(lambda x: results(call, x, {}))(x)
    used = {axis for axis in spec if axis}
    options = {}
    if mode == "explicit":
        split = lambda name: P(*(axis if axis in used else None for axis in DIMENSIONS.get(name, "ab")))
        x = {name: jax.device_put(y, NamedSharding(mesh, split(name))) for name, y in x.items()}
    else:
        options = dict(sharding=NamedSharding(mesh, spec))
    got = jax.jit(lambda x: results(call, x, {}, **options))(x)
    jax.tree.map(lambda y, z: assert_close("result", y, z, 1e-5), got, want)


@pytest.mark.parametrize("kind", KINDS)
def test_context_axis(kind):
    """The boundaries count the tokens of q on all devices; the padding is NaN, also where gates are raw."""
    call, make = KINDS[kind]
    x, mesh = make(1, *SIZES[1:], num_states=3), make_mesh((4,), "automatic")
    fixed = dict(cu_seqlens=jnp.array([0, 5, 16, 21], jnp.int32))
    if kind == "delta_product":
        x |= dict(A_log=jnp.zeros(4), dt_bias=jnp.ones(4))
        call = functools.partial(call, use_gate_in_kernel=True)
    tokens = {name for name, y in x.items() if y.ndim > 2 and name != "initial_state"}
    x = poison_padding(x, **fixed)
    want = jax.jit(lambda x: call(**x, **fixed, output_final_state=True))(x)

    def whole(x):
        specs = {name: P(None, "a") if name in tokens else P() for name in x}
        run = lambda x: call(**x, **fixed, output_final_state=True, context_axis="a")
        return jax.shard_map(run, mesh=mesh, in_specs=(specs,), out_specs=(P(None, "a"), P()))(x)

    got = jax.jit(whole)(x)
    jax.tree.map(lambda y, z: assert_close("result", y, z, 1e-5), got, want)
    loss = lambda run: jax.jit(jax.grad(lambda x: sum(jnp.sum(jnp.sin(y)) for y in run(x))))
    gradients = loss(whole)(x), loss(lambda x: call(**x, **fixed, output_final_state=True))(x)
    jax.tree.map(lambda y, z: assert_close("gradient", y, z, 1e-5), *gradients)
    assert np.isfinite(np.concatenate([y.ravel() for y in gradients[0].values()])).all()
