"""What is not finite in one sequence leaves every bit of the others, and padding may hold anything."""

import jax.numpy as jnp
import pytest

from chunkwise.kkt import chunk_scaled_dot_kkt
from chunkwise.shared.testing import Case, assert_isolated

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
    names = ["k", "beta", gates]

    def run(x, cu_seqlens):
        operands = (x[name] for name in names)
        return dict(A=chunk_scaled_dot_kkt(*operands, cu_seqlens, 16, implementation=implementation))

    # Strong gates hide a sequence's first key: all that reads it is decayed to zero.
    assert_isolated(run, arguments(case, names), case.cu_seqlens)
