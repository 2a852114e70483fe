"""The cumulative sum against its definition in float64."""

import jax.numpy as jnp
import pytest

from chunkwise.cumsum import chunk_local_cumsum
from chunkwise.shared.testing import stage_oracle
from chunkwise.shared.testing.cases import CASES
from chunkwise.shared.testing.compare import STAGE_TOLERANCE


@pytest.mark.parametrize("implementation", ["xla", "pallas"])
@pytest.mark.parametrize("reverse", [False, True], ids=["forward", "reverse"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_definition(case, reverse, implementation):
    g = case.arguments()["g"].astype(case.dtype)
    cut = dict(chunk_size=case.chunk_size, cu_seqlens=case.cu_seqlens, reverse=reverse)
    G = chunk_local_cumsum(g, **cut, implementation=implementation)
    assert G.dtype == jnp.float32
    case.assert_close("G", G, stage_oracle.cumsum(g, **cut), STAGE_TOLERANCE)


@pytest.mark.parametrize("implementation", ["xla", "pallas"])
@pytest.mark.parametrize("channels", [1, 3, 60, 64, 100, 128, 256])
def test_gate_per_channel(channels, implementation):
    g = -jnp.arange(1.0, 41 * 2 * channels + 1).reshape(1, 41, 2, channels) % 7 / 3
    G = chunk_local_cumsum(g, 32, implementation=implementation)
    CASES[0].assert_close("G", G, stage_oracle.cumsum(g, 32), STAGE_TOLERANCE)
