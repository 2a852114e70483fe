"""Under jit, vmap, remat, grad, eval_shape and export."""

import functools

import jax
import jax.numpy as jnp
import pytest

from chunkwise.chunk_o import chunk_fwd_o
from chunkwise.shared.testing import stage_oracle
from chunkwise.shared.testing.cases import Case
from chunkwise.shared.testing.compare import assert_close, assert_gradients
from chunkwise.shared.testing.inputs import boundaries
from chunkwise.shared.testing.transforms import TRANSFORMS, assert_traced_once, assert_transform

NAMES = ("q", "k", "v", "h", "g_cum")
both = pytest.mark.parametrize("implementation", ["xla", "pallas"])


def arguments(**sizes):
    x = Case(**dict(T=20, HV=2, K=3, V=2, chunk_size=16) | sizes).arguments()
    return {name: x[name] for name in NAMES}


def run(implementation, **cut):
    return functools.partial(chunk_fwd_o, chunk_size=16, implementation=implementation, **cut)


@pytest.mark.interpreted
@both
@pytest.mark.parametrize("transform", TRANSFORMS)
def test_transform(transform, implementation):
    assert_transform(transform, run(implementation), tuple(arguments(B=2).values()))


@pytest.mark.parametrize(
    ("implementation", "lengths"),
    [
        pytest.param("xla", None, id="fixed-xla", marks=pytest.mark.thorough),
        pytest.param("xla", (1, 0, 17), id="packed-xla"),
        pytest.param("pallas", None, id="fixed-pallas"),
        pytest.param("pallas", (1, 0, 17), id="packed-pallas"),
    ],
)
def test_gradients(lengths, implementation):
    cut = dict(cu_seqlens=None if lengths is None else boundaries(*lengths))
    x = arguments() if lengths is None else arguments(HV=1, T=18, lengths=lengths)
    x["scale"] = jnp.float32(0.7)
    assert_gradients(run(implementation, **cut), functools.partial(stage_oracle.output, chunk_size=16, **cut), x)


@both
def test_gradient_of_a_scale_of_zero(implementation):
    x = arguments()
    one, loss = run(implementation)(**x, scale=1.0), lambda scale: jnp.sum(run(implementation)(**x, scale=scale))
    assert_close("dscale", jax.grad(loss)(jnp.float32(0.0)), jnp.sum(one), 1e-5)


@pytest.mark.interpreted
@both
def test_boundaries_are_traced(implementation):
    x = arguments(lengths=(1, 0, 19))
    batches = [(x, boundaries(*lengths)) for lengths in [(1, 0, 19), (16, 2, 2)]]
    assert_traced_once(lambda x, cu_seqlens: run(implementation, cu_seqlens=cu_seqlens)(**x), *batches)
