"""Prefills that start from slots of a pool of states and end in them."""

import jax.numpy as jnp
import pytest

from chunkwise.kda.operator import OPERATOR
from chunkwise.shared.testing.inputs import make_inputs
from tests.pool_suite import PREFILL_TOKENS, assert_prefills

# The pipeline has steps from pools of the other types.
QUICK = (jnp.float32, jnp.bfloat16, True)
THOROUGH = dict(test_prefills=lambda dtype, pool, blocks: (dtype, pool, blocks) != QUICK)


@pytest.mark.parametrize("blocks", [False, True])
@pytest.mark.parametrize("pool", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_prefills(dtype, pool, blocks):
    x = make_inputs(1, PREFILL_TOKENS, 1, 2, 16, 24, dtype=dtype, per_channel=True)
    assert_prefills(OPERATOR, x, pool, blocks=blocks, use_qk_l2norm_in_kernel=True, chunk_size=16)
