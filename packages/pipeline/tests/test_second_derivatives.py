"""Products of Hessians with vectors under "xla", beside differences of the float64 gradient, in every order."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from chunkwise.pipeline.operators import CHUNKED, OPERATORS
from chunkwise.pipeline.stages import PARTS, STAGES
from chunkwise.shared.implementation import platforms
from chunkwise.shared.testing import cases
from chunkwise.shared.testing.compare import GRADIENT_TOLERANCE, assert_close, by_part
from chunkwise.shared.testing.inputs import boundaries
from chunkwise.shared.testing.oracle import reference

TOLERANCE = GRADIENT_TOLERANCE["float32"]
NAMES = [x.name for x in CHUNKED]
# Three sequences, of which one is empty, and padding.
LENGTHS = boundaries(23, 0, 14)
THOROUGH = dict(
    # One of them solves in the loop over chunks and the other one before it.
    test_hessian_of_an_operator=lambda name, case: (name, case) not in (
        ("chunk_gated_delta_rule", "rows"), ("chunk_kda", "rows"),
    ),
    test_every_order=lambda name: name != "chunk_gated_delta_rule",
    test_hessian_of_a_stage=lambda stage: stage.name not in ("chunk_local_cumsum", "rms_norm_gated"),
)  # fmt: skip


def directions(x):
    """Return a direction for every array."""
    rng = np.random.default_rng(3)
    return jax.tree.map(lambda y: jnp.asarray(rng.standard_normal(y.shape) * 0.1, jnp.float32), x)


def differences(gradient, x, dx, step=1e-5):
    """Return the change of a float64 gradient along dx, by central differences."""
    at = lambda t: gradient(jax.tree.map(lambda y, dy: np.asarray(y, np.float64) + t * np.asarray(dy), x, dx))
    above, below = at(step), at(-step)
    return {name: jax.tree.map(lambda a, b: (a - b) / (2 * step), above[name], below[name]) for name in x}


def assert_alike(found, expected):
    found = by_part(found)
    for name, want in by_part(expected).items():
        assert_close(name, found[name], want, TOLERANCE)


def hessian_product(loss):
    """Return a function from arrays and their directions to the change of the gradient, forward over reverse."""
    return lambda x, dx: jax.jvp(jax.grad(loss), (x,), (dx,))[1]


def _in_gpu_form(run):
    """Return a function that compiles and runs another one with the forms for GPUs."""

    def call(*args):
        jax.clear_caches()
        with platforms.gpu_forms():
            results = jax.jit(run)(*args)
        jax.clear_caches()
        return results

    return call


@pytest.mark.parametrize("case", ["rows", "packed", "stream", "gpu"])
@pytest.mark.parametrize("name", NAMES)
def test_hessian_of_an_operator(name, case):
    operator, cu_seqlens = OPERATORS[name], LENGTHS if case in ("packed", "stream") else None
    states = 0 if case == "stream" else 1 if cu_seqlens is None else 3
    options = dict(cu_seqlens=cu_seqlens) | (dict(use_qk_l2norm_in_kernel=True) if operator.delta else {})
    x = operator.source.inputs(1, 40, 1, 2, 8, 8, num_states=states, normalise=not operator.delta)
    rng = np.random.default_rng(1)
    do, dht = rng.standard_normal(x["v"].shape), rng.standard_normal((3 if cu_seqlens is not None else 1, 2, 8, 8))

    def loss(x):
        o, state = operator.function(**x, **options, output_final_state=states > 0, chunk_size=16, implementation="xla")
        return jnp.sum(o * do) + (jnp.sum(state * dht) if states else 0.0)

    found = (_in_gpu_form if case == "gpu" else jax.jit)(hessian_product(loss))(x, directions(x))
    gradient = lambda x: reference(**x, **options, do=do, dht=dht if states else None)[2]
    assert_alike(found, differences(gradient, x, directions(x)))


@pytest.mark.parametrize("name", ["chunk_gated_delta_rule", "chunk_kda", "chunk_gla"])
def test_every_order(name):
    """The derivative of a gradient, the gradient of a derivative, and the gradient of a product with a gradient."""
    operator = OPERATORS[name]
    x = operator.source.inputs(1, 20, 1, 1, 8, 8)
    dx = directions(x)
    loss = lambda x: jnp.sum(jnp.sin(operator.function(**x, chunk_size=16, implementation="xla")[0]))
    dot = lambda a, b: sum(jnp.vdot(a[name], b[name]) for name in a)

    @jax.jit
    def orders(x):
        forward_over_reverse = jax.jvp(jax.grad(loss), (x,), (dx,))[1]
        reverse_over_forward = jax.grad(lambda x: jax.jvp(loss, (x,), (dx,))[1])(x)
        return forward_over_reverse, reverse_over_forward, jax.grad(lambda x: dot(jax.grad(loss)(x), dx))(x)

    first, *others = orders(x)
    for other in others:
        assert_alike(other, first)
    exact = lambda x: reference(**x, do=np.cos(reference(**x)[0]))[2]
    assert_alike(first, differences(exact, x, dx))


@pytest.mark.parametrize("stage", [*STAGES, *PARTS], ids=lambda x: x.name)
def test_hessian_of_a_stage(stage):
    """The second derivative of a sum of sines along one direction, in forward mode over a gradient and twice."""
    case = cases.Case(T=20, HV=2, K=3, V=2, chunk_size=16, lengths=(1, 0, 17))
    # Near a row of zeros the norm bends within the step of a difference.
    ones = lambda y: jnp.where(jnp.isnan(y) | (y == 0.0), 1.0, y)
    x = {name: ones(y) for name, y in stage.inputs(case).items() if name in stage.reads}
    dx, cu_seqlens = directions(x), case.cu_seqlens
    sines = lambda numpy, results: sum(numpy.sum(numpy.sin(y)) for y in results.values())
    loss = lambda x: sines(jnp, stage.run(x, case.chunk_size, cu_seqlens, implementation="xla"))
    slope = lambda x: jax.jvp(loss, (x,), (dx,))[1]
    both = jax.jit(lambda x: (hessian_product(loss)(x, dx), jax.jvp(slope, (x,), (dx,))[1]))
    over_gradient, twice = both(x)

    def exact(t, step=1e-3):
        at = {name: np.asarray(y, np.float64) + t * step * np.asarray(dx[name]) for name, y in x.items()}
        return sines(np, stage.define(at, case.chunk_size, cu_seqlens)) / step**2

    want = exact(1) - 2 * exact(0) + exact(-1)
    assert_close("over a gradient", sum(jnp.vdot(over_gradient[name], dx[name]) for name in x), want, TOLERANCE)
    assert_close("forward twice", twice, want, TOLERANCE)
