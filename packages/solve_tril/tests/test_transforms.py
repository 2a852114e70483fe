"""Under jit, vmap, remat, grad, eval_shape and export."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from chunkwise.shared.testing import stage_oracle
from chunkwise.shared.testing.cases import Case
from chunkwise.shared.testing.compare import assert_gradients
from chunkwise.shared.testing.inputs import boundaries
from chunkwise.shared.testing.transforms import TRANSFORMS, assert_traced_once, assert_transform
from chunkwise.solve_tril import solve_tril

both = pytest.mark.parametrize("implementation", ["xla", "pallas"])


def matrices(**sizes):
    return Case(**dict(T=20, K=3, chunk_size=16) | sizes).arguments()["A"]


@pytest.mark.interpreted
@both
@pytest.mark.parametrize("transform", TRANSFORMS)
def test_transform(transform, implementation):
    assert_transform(transform, functools.partial(solve_tril, implementation=implementation), (matrices(B=2),))


SIZES = ({}, dict(lengths=(1, 0, 17)), dict(T=32, chunk_size=32))


@pytest.mark.parametrize(
    ("implementation", "sizes"),
    [
        *(("pallas", sizes) for sizes in SIZES),
        ("xla", SIZES[1]),
        *(pytest.param("xla", sizes, marks=pytest.mark.thorough) for sizes in (SIZES[0], SIZES[2])),
    ],
    ids=str,
)
def test_gradients(sizes, implementation):
    cut = dict(cu_seqlens=boundaries(*sizes["lengths"]) if "lengths" in sizes else None)
    run = functools.partial(solve_tril, implementation=implementation, **cut)
    A = jnp.nan_to_num(matrices(**sizes))
    assert_gradients(run, functools.partial(stage_oracle.inverse, **cut), dict(A=A))


@pytest.mark.interpreted
@both
def test_known_inverse(implementation):
    """It is returned as it is, and the gradient is that of the inverse."""
    run = functools.partial(solve_tril, implementation=implementation, cu_seqlens=boundaries(1, 0, 17))
    A = jnp.nan_to_num(matrices())
    A_inv, pull = jax.vjp(run, A)
    known, pull_known = jax.vjp(lambda A, A_inv: run(A, A_inv=A_inv), A, A_inv)
    np.testing.assert_array_equal(known, A_inv)
    dA, dA_inv = pull_known(jnp.cos(A_inv))
    np.testing.assert_array_equal(dA, *pull(jnp.cos(A_inv)))
    assert not dA_inv.any()


@pytest.mark.interpreted
@both
def test_boundaries_are_traced(implementation):
    A = matrices()
    batches = [(A, boundaries(*lengths)) for lengths in [(1, 0, 19), (16, 2, 2)]]
    assert_traced_once(functools.partial(solve_tril, implementation=implementation), *batches)
