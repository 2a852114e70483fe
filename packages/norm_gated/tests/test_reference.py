"""Both implementations against the definition in float64: values and gradients."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from chunkwise.norm_gated import rms_norm_gated
from chunkwise.shared.testing import conv_norm_oracle
from chunkwise.shared.testing.compare import GRADIENT_TOLERANCE, TOLERANCE, assert_close
from tests.gradients import numeric_gradients

# The last axis of several sizes: parts of a register, whole ones, several; a row that is one group; rows past a block.
SHAPES = [(2, 5, 3, 64), (1, 40, 4, 96), (2, 9, 2, 128), (1, 70, 2, 192), (1, 3, 2, 256), (3, 200), (64,), (2, 3, 70)]
THOROUGH = dict(
    test_activations_and_gradients_are_those_of_the_definition=lambda activation, implementation: (
        activation != "silu" if implementation == "xla" else activation is None
    ),
    test_values=lambda shape, implementation: shape not in (SHAPES[:2] if implementation == "xla" else SHAPES[1::2]),
    test_gradients_of_the_kernel_are_those_of_plain_jax=lambda shape: shape not in ((2, 5, 3, 64), (64,)),
)


def definition(x, activation="silu", **options):
    return conv_norm_oracle.rms_norm_gated(**x, name=activation, **options)


def inputs(shape, dtype=jnp.float32, size=1.0):
    rng = np.random.default_rng(0)
    x, z = (jnp.asarray(size * rng.standard_normal(shape), dtype) for _ in range(2))
    return dict(x=x, z=z, weight=jnp.asarray(rng.standard_normal(shape[-1:]), dtype))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("implementation", ["xla", "pallas"])
def test_values(shape, implementation):
    for dtype in (jnp.float32, jnp.bfloat16):
        x = inputs(shape, dtype)
        y = rms_norm_gated(**x, implementation=implementation)
        assert y.dtype == dtype
        assert_close("y", y, definition(x), TOLERANCE[dtype.dtype.name])


@pytest.mark.parametrize("norm_before_gate", [True, False])
@pytest.mark.parametrize("activation", ["silu", "sigmoid", None, "no gate"])
@pytest.mark.parametrize("implementation", ["xla", "pallas"])
def test_activations_and_gradients_are_those_of_the_definition(activation, norm_before_gate, implementation):
    x = inputs(shape := (2, 3, 2, 6) if norm_before_gate else (3, 2, 6))
    if not norm_before_gate:  # as in Mamba-2, every head has weights of its own
        x["weight"] = x["z"][0]
    if activation == "no gate":
        x["z"], activation = None, "silu"
    options = dict(activation=activation, norm_before_gate=norm_before_gate)
    y = rms_norm_gated(**x, **options, implementation=implementation, in_place=not norm_before_gate)
    assert_close("y", y, definition(x, **options), TOLERANCE["float32"])
    dy = np.random.default_rng(1).standard_normal(shape)
    _, pull = jax.vjp(lambda x: rms_norm_gated(**x, **options, implementation=implementation), x)
    (d,) = pull(jnp.asarray(dy, jnp.float32))
    given = {name: y for name, y in x.items() if y is not None}
    for name, want in numeric_gradients(lambda **y: definition(x | y, **options), given, [dy]).items():
        assert_close(f"d{name}", d[name], want, GRADIENT_TOLERANCE["float32"])


@pytest.mark.parametrize("shape", SHAPES)
def test_gradients_of_the_kernel_are_those_of_plain_jax(shape):
    """Plain JAX is differentiated by JAX, and its gradients are compared with the definition above."""
    for dtype in (jnp.float32, jnp.bfloat16):
        x = inputs(shape, dtype)
        dy = jnp.asarray(np.random.default_rng(1).standard_normal(shape), dtype)
        wide = jax.tree.map(lambda y: y.astype(jnp.float32), (x, dy))

        @functools.partial(jax.jit, static_argnums=0)
        def gradients(implementation, x, dy):
            return jax.vjp(lambda x: rms_norm_gated(**x, implementation=implementation), x)[1](dy)[0]

        want = gradients("xla", *wide)
        for name, d in gradients("pallas", x, dy).items():
            assert d.dtype == dtype
            assert_close(f"d{name}", d, want[name], GRADIENT_TOLERANCE[dtype.dtype.name])


@pytest.mark.parametrize("implementation", ["xla", "pallas"])
def test_eps_and_a_row_of_zeros(implementation):
    x = inputs((2, 4, 2, 8), size=1e-3) | dict(x=jnp.zeros((2, 4, 2, 8)).at[0, 0, 0, 0].set(1e-3))
    y = rms_norm_gated(**x, eps=1e-2, implementation=implementation)
    assert_close("y", y, definition(x, eps=1e-2), 1e-5)
    assert not np.asarray(y)[1].any()


@pytest.mark.parametrize("implementation", ["xla", "pallas"])
def test_types_may_differ_and_the_result_has_that_of_x(implementation):
    x = inputs((1, 5, 2, 16))
    mixed = x | dict(z=x["z"].astype(jnp.bfloat16), x=x["x"].astype(jnp.float16))
    y = rms_norm_gated(**mixed, implementation=implementation)
    assert y.dtype == jnp.float16
    want = definition(mixed)
    assert_close("y", y, want, 1e-3)


@pytest.mark.parametrize("norm_before_gate", [True, False])
@pytest.mark.parametrize("size", [1e-20, 1e-12, 3e19, 1e30])
def test_every_size(size, norm_before_gate):
    """Squares would be more than float32 holds, or less; with eps = 0 a norm does not depend on the size."""
    x = inputs((2, 3, 2, 70))
    x["x"] = jnp.float32(size) * x["x"]
    options = dict(norm_before_gate=norm_before_gate, eps=0.0 if size < 1 else 1e-6)
    y, pull = jax.vjp(lambda x: rms_norm_gated(**x, **options, implementation="xla"), x)
    assert_close("y", y, definition(x, **options), 1e-5)
    (d,) = pull(jnp.ones_like(y))
    for name, want in numeric_gradients(lambda **x: definition(x, **options), x, [np.ones(y.shape)]).items():
        if name != "x":  # as small as x is large
            assert_close(f"d{name}", d[name], want, GRADIENT_TOLERANCE["float32"])
