"""What is not finite in one sequence leaves every bit of the others, and padding may hold anything."""

import jax.numpy as jnp
import pytest

from chunkwise.shared.testing import Case, assert_isolated
from chunkwise.wy_fast import recompute_w_u

BATCHES = [
    Case(B=2, T=19, HV=2, K=4, V=3, chunk_size=16),
    Case(T=30, HV=2, K=4, V=3, chunk_size=16, lengths=(5, 0, 18)),
]


def arguments(case, names):
    x = {name: jnp.nan_to_num(value) for name, value in case.arguments().items()}
    return {name: jnp.nan_to_num(case.channel_gates()) if name == "gk_cum" else x[name] for name in names}


@pytest.mark.parametrize("implementation", ["xla", "pallas"])
@pytest.mark.parametrize("gates", ["g_cum", "gk_cum"])
@pytest.mark.parametrize("case", BATCHES, ids=str)
def test_isolated(case, gates, implementation):
    names = ["k", "v", "beta", "A_inv", gates]

    def run(x, cu_seqlens):
        results = recompute_w_u(*(x[name] for name in names), cu_seqlens, implementation=implementation)
        return dict(zip("wu", results, strict=True))

    assert_isolated(run, arguments(case, names), case.cu_seqlens)
