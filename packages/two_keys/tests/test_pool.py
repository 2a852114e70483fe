"""Prefills that start from slots of a pool of states and end in them, and decodes beside them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from chunkwise.shared.testing.compare import TOLERANCE, assert_close
from chunkwise.shared.testing.inputs import boundaries
from chunkwise.shared.testing.oracle import reference
from tests.either_two_keys import KINDS
from tests.pool_suite import PREFILL_TOKENS, assert_prefills

THOROUGH = dict(
    # The kernels are KDA's, whose tests have a quick one; steps have prefills too.
    test_prefills=True,
    test_steps=True,
)


@pytest.mark.parametrize("pool", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
def test_prefills(kind, dtype, pool):
    x = KINDS[kind].inputs(1, PREFILL_TOKENS, 1, 2, 16, 24, dtype=dtype, normalise=False)
    assert_prefills(KINDS[kind].record, x, pool, blocks=True, use_qk_l2norm_in_kernel=True, chunk_size=16)


@pytest.mark.parametrize("implementation", ["xla", "fused"])
@pytest.mark.parametrize("kind", KINDS)
def test_steps(kind, implementation):
    """Two decodes, one of which starts from zeros, and a prefill; padding is NaN, and other slots keep every bit."""
    x, cu = KINDS[kind].inputs(1, 12, 1, 2, 8, 16), boundaries(1, 1, 7)
    pool = jnp.asarray(np.random.default_rng(5).standard_normal((6, 2, 8, 16)), jnp.float32)
    slots, kept = jnp.array([4, 0, 3], jnp.int32), jnp.array([True, False, True])
    spoilt = {name: y.at[:, 9:].set(jnp.nan) for name, y in x.items()}
    run = jax.jit(
        lambda x, pool: KINDS[kind].ragged(
            **x, states=pool, cu_seqlens=cu, state_indices=slots, has_initial_state=kept, num_decodes=jnp.int32(2),
            implementation=implementation,
        )
    )  # fmt: skip
    o, after = run(spoilt, pool)
    start = jnp.where(kept[:, None, None, None], pool[slots], 0.0)
    o_ref, states = reference(**x, initial_state=start, cu_seqlens=cu)
    assert_close("o", o[:, :9], o_ref[:, :9], TOLERANCE["float32"])
    assert_close("states", after[slots], states, TOLERANCE["float32"])
    np.testing.assert_array_equal(np.delete(after, slots, 0), np.delete(pool, slots, 0))
