"""Operators divide themselves over rows, value heads and value channels: values and gradients in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding

from chunkwise.pipeline import chunk_gated_delta_rule, chunk_kda, chunk_simple_gla, recurrent_gated_delta_rule
from chunkwise.pipeline.operators import OPERATORS
from chunkwise.shared.testing.compare import assert_close
from tests.laws import raw_inputs
from tests_e2e.mesh.meshes import P, assert_divided, inputs_of, make_mesh

# A kernel of each kind, and plain JAX where its gates differ.
QUICK = [(f"{form}_gated_delta_rule", "fused") for form in ("chunk", "recurrent")]
QUICK += [("chunk_gla", "xla"), ("recurrent_kda", "xla")]
THOROUGH = dict(
    test_divisions=lambda division, mode: mode == "automatic" or division in ("rows", "heads"),
    test_operators=lambda name, implementation: (name, implementation) not in QUICK,
    test_laws_and_their_gradients=lambda mode: mode == "explicit",
)

# Shape of the mesh, how v is split, and key and value heads.
DIVISIONS = {
    "rows": ((2,), P("a"), 2, 4),
    "heads": ((2,), P(None, None, "a"), 2, 4),
    "rows-and-heads-over-two-axes": ((2, 2, 2), P("a", None, ("b", "c")), 4, 8),
    "channels": ((4,), P(None, None, None, "a"), 2, 4),
    # One key head for two devices, and devices whose value heads cut the groups of key heads.
    "heads-that-share-keys": ((8,), P(None, None, "a"), 4, 8),
    "heads-that-cut-groups": ((2,), P(None, None, "a"), 3, 6),
    "key-heads-over-one-of-two-axes": ((2, 2), P(None, None, ("a", "b")), 2, 8),
    "an-axis-unused": ((2, 4), P(None, None, "a"), 2, 4),
    "nothing": ((8,), P(), 2, 4),
}


@pytest.mark.parametrize("mode", ["explicit", "automatic"])
@pytest.mark.parametrize("division", DIVISIONS)
def test_divisions(division, mode):
    shape, spec, H, HV = DIVISIONS[division]
    x = inputs_of("chunk_gated_delta_rule", B=2, T=20, H=H, HV=HV)
    assert_divided("chunk_gated_delta_rule", "xla", make_mesh(shape, mode), spec, mode, x)


@pytest.mark.parametrize(
    ("name", "implementation"),
    [(operator.name, implementation) for operator in OPERATORS.values() for implementation in operator.implementations],
)
def test_operators(name, implementation):
    x = inputs_of(name, B=2, T=4 if name.startswith("recurrent") else 20, gate="spikes")
    assert_divided(name, implementation, make_mesh((2, 2), "explicit"), P("a", None, "b"), "explicit", x)


@pytest.mark.parametrize("key_heads", [None, "a", ("a", "b")])
def test_key_heads_may_be_split_by_the_caller(key_heads):
    """By the first of the axes of the value heads, by all, or not at all."""
    x = inputs_of("chunk_gated_delta_rule", T=20, H=4, HV=8)
    mesh, spec = make_mesh((2, 2), "explicit"), P(None, None, ("a", "b"))
    assert_divided("chunk_gated_delta_rule", "xla", mesh, spec, "explicit", x, key_heads=key_heads)


@pytest.mark.parametrize("mode", ["automatic", "explicit"])
def test_laws_and_their_gradients(mode):
    """The arrays of the laws have one entry for every value head, dt_bias flat one for every channel too."""
    x = raw_inputs(inputs_of("chunk_kda", T=20))
    mesh = make_mesh((2, 2), mode)
    placed = x if mode == "automatic" else jax.tree.map(lambda y: jax.device_put(y, NamedSharding(mesh, P())), x)
    if mode == "explicit":
        placed["v"] = jax.device_put(x["v"], NamedSharding(mesh, P("a", None, "b")))
    options = dict(sharding=NamedSharding(mesh, P("a", None, "b"))) if mode == "automatic" else {}
    laws = dict(use_gate_in_kernel=True, use_beta_sigmoid_in_kernel=True)
    loss = lambda x, **o: jnp.sum(jnp.sin(chunk_kda(**x, **laws, **o)[0]))
    got, want = jax.jit(lambda x: jax.grad(loss)(x, **options))(placed), jax.jit(jax.grad(loss))(x)
    for name in x:
        assert_close(f"d{name}", got[name], want[name], 1e-5)


def test_constant_gate_and_traced_scale():
    """What all devices share gets its gradient as a sum over those that split v, and only them."""
    mesh = make_mesh((2, 2, 2), "automatic")
    x = inputs_of("chunk_simple_gla", T=20) | {"g_gamma": -jnp.arange(1.0, 5.0) / 4, "scale": jnp.float32(0.3)}
    loss = lambda x, **o: jnp.sum(jnp.sin(chunk_simple_gla(**x, **o)[0]))
    sharding = NamedSharding(mesh, P("a", None, "b"))
    got = jax.jit(lambda x: jax.grad(loss)(x, sharding=sharding))(x)
    want = jax.jit(jax.grad(loss))(x)
    for name in x:
        assert_close(f"d{name}", got[name], want[name], 1e-5)


@pytest.mark.parametrize("implementation", ["xla", "fused"])
def test_pool_over_rows_and_heads(implementation):
    """The slot of a sequence lies in the part of its device; a negative one is neither read nor written."""
    mesh = make_mesh((2, 2), "automatic")
    x = inputs_of("recurrent_gated_delta_rule", B=4, T=1, states=8)
    slots = jnp.array([3, -1, 7, 4], jnp.int32)
    options = dict(output_final_state=True, state_indices=slots, implementation=implementation)
    run = lambda x, **o: recurrent_gated_delta_rule(**x, **options, **o)
    want, got = run(x), jax.jit(lambda x: run(x, sharding=NamedSharding(mesh, P("a", None, "b"))))(x)
    for name, y, ref in zip(("o", "pool"), got, want, strict=True):
        assert_close(name, y, ref, 1e-6)


def test_slot_of_another_device_gives_nan():
    """Its state cannot be had without communication: the output says so, and nothing is written."""
    mesh = make_mesh((2,), "automatic")
    x = inputs_of("recurrent_gated_delta_rule", B=2, T=1, states=4)
    slots = jnp.array([3, 2], jnp.int32)
    options = dict(output_final_state=True, state_indices=slots, sharding=NamedSharding(mesh, P("a")))
    o, pool = recurrent_gated_delta_rule(**x, **options)
    assert np.isnan(o[0]).all()
    assert np.isfinite(o[1]).all()
    np.testing.assert_array_equal(pool[jnp.array([0, 1, 3])], x["initial_state"][jnp.array([0, 1, 3])])


@pytest.mark.parametrize("implementation", ["xla", "fused"])
def test_slot_past_the_whole_pool_is_none(implementation):
    """As on one device: no device has it, and the output of its sequence is that of a start from zeros."""
    mesh = make_mesh((2,), "automatic")
    x = inputs_of("recurrent_gated_delta_rule", B=4, T=1, states=8)
    options = dict(output_final_state=True, implementation=implementation)
    run = lambda x, slots, **o: recurrent_gated_delta_rule(**x, state_indices=slots, **options, **o)
    want = run(x, jnp.array([3, -1, -1, 4], jnp.int32))
    sharded = jax.jit(lambda x, slots: run(x, slots, sharding=NamedSharding(mesh, P("a"))))
    for name, y, ref in zip(("o", "pool"), sharded(x, jnp.array([3, 8, 2**31 - 1, 4], jnp.int32)), want, strict=True):
        assert_close(name, y, ref, 1e-6)


def test_specification_without_a_mesh_takes_that_of_the_context():
    mesh, x = make_mesh((2,), "automatic"), inputs_of("chunk_gated_delta_rule", T=20)
    with jax.set_mesh(mesh):
        o = jax.jit(lambda x: chunk_gated_delta_rule(**x, sharding=P("a"))[0])(x)
    assert_close("o", o, chunk_gated_delta_rule(**x)[0], 1e-6)
