"""What is not finite in one sequence leaves every bit of the others, and padding may hold anything."""

import jax.numpy as jnp
import pytest

from chunkwise.cumsum import chunk_local_cumsum
from chunkwise.shared.testing import Case, assert_isolated

BATCHES = [
    Case(B=2, T=19, HV=2, K=4, V=3, chunk_size=16),
    Case(T=30, HV=2, K=4, V=3, chunk_size=16, lengths=(5, 0, 18)),
]


def arguments(case, names):
    x = {name: jnp.nan_to_num(value) for name, value in case.arguments().items()}
    return {name: jnp.nan_to_num(case.channel_gates()) if name == "gk_cum" else x[name] for name in names}


@pytest.mark.parametrize("implementation", ["xla", "pallas"])
@pytest.mark.parametrize("reverse", [False, True], ids=["forward", "reverse"])
@pytest.mark.parametrize("case", BATCHES, ids=str)
def test_isolated(case, reverse, implementation):
    def run(x, cu_seqlens):
        return dict(g_cum=chunk_local_cumsum(x["g"], 16, reverse, cu_seqlens, implementation=implementation))

    assert_isolated(run, arguments(case, ["g"]), case.cu_seqlens)
