"""Gates per channel against their definition in float64."""

import jax.numpy as jnp
import pytest

from chunkwise.cumsum import chunk_local_cumsum
from chunkwise.shared.testing import stage_oracle
from chunkwise.shared.testing.compare import STAGE_TOLERANCE
from tests.stage_cases import CASES


@pytest.mark.parametrize("implementation", ["xla", "pallas"])
@pytest.mark.parametrize("channels", [1, 3, 60, 64, 100, 128, 256])
def test_gate_per_channel(channels, implementation):
    g = -jnp.arange(1.0, 41 * 2 * channels + 1).reshape(1, 41, 2, channels) % 7 / 3
    G = chunk_local_cumsum(g, 32, implementation=implementation)
    CASES[0].assert_close("G", G, stage_oracle.cumsum(g, 32), STAGE_TOLERANCE)
