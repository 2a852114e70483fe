"""Prefills that start from slots of a pool of states and end in them."""

import jax.numpy as jnp
import pytest

from chunkwise.fused_gla.operator import GLA, SIMPLE_GLA
from chunkwise.shared.testing.inputs import make_inputs
from tests.pool_suite import PREFILL_TOKENS, assert_prefills

# Prefills over a pool are written once, and KDA's package has a quick one.
THOROUGH = dict(test_prefills=True)


@pytest.mark.parametrize("blocks", [False, True])
@pytest.mark.parametrize("pool", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("per_channel", [False, True])
def test_prefills(per_channel, pool, blocks):
    x = make_inputs(1, PREFILL_TOKENS, 1, 2, 16, 24, per_channel=per_channel)
    x.pop("beta")
    assert_prefills(GLA if per_channel else SIMPLE_GLA, x, pool, blocks=blocks, chunk_size=16)
