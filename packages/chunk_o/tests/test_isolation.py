"""What is not finite in one sequence leaves every bit of the others, and padding may hold anything."""

import jax.numpy as jnp
import pytest

from chunkwise.chunk_o import chunk_fwd_o
from chunkwise.shared.testing.cases import ISOLATION_CASES
from chunkwise.shared.testing.poison import assert_isolated


@pytest.mark.parametrize(
    ("gates", "implementation"),
    [
        ("g_cum", "xla"),
        ("g_cum", "pallas"),
        ("gk_cum", "pallas"),
        pytest.param("gk_cum", "xla", marks=pytest.mark.thorough),
    ],
)
@pytest.mark.parametrize("case", ISOLATION_CASES, ids=str)
def test_isolated(case, gates, implementation):
    names = ["q", "k", "v_new", "h", gates]

    def run(x, cu_seqlens):
        options = dict(scale=x["scale"], cu_seqlens=cu_seqlens, chunk_size=16, implementation=implementation)
        return dict(o=chunk_fwd_o(*(x[name] for name in names), **options))

    x = case.finite_arguments(*names) | dict(scale=jnp.float32(0.3))
    assert_isolated(run, x, case.cu_seqlens, chunk_size=16, shared=["scale"])
