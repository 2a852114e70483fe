"""What is not finite in one sequence must not change one bit of another, nor of another row of a batch."""

import functools

import jax.numpy as jnp
import numpy as np
import pytest

from chunkwise.fused_gdn import Config, chunk_gated_delta_rule
from chunkwise.shared.testing.inputs import boundaries, make_inputs
from tests.poison import assert_operator_isolated

# The first chunk ends inside a sequence, the second begins with a new one; one is empty; padding follows.
LENGTHS = (5, 0, 20, 7, 16)
QUICK = ("sequences", jnp.float32, "fused")
THOROUGH = dict(
    test_isolated=lambda of, dtype, implementation: (of, dtype, implementation) != QUICK,
    test_a_spoilt_sequence_stays_so=True,
)


@pytest.mark.parametrize("implementation", ["xla", "fused"])
@pytest.mark.parametrize(
    ("of", "dtype", "config"),
    [
        *((of + states, jnp.float32, None) for of in ("sequences", "rows") for states in ("", " with states")),
        ("sequences", jnp.bfloat16, Config(heads=1, heads_bwd=2)),
    ],
)
def test_isolated(of, dtype, config, implementation):
    # A block of one of two heads is whole registers.
    D = 16 if config is None else 128
    make = functools.partial(make_inputs, H=1, HV=2, K=D, V=D, dtype=dtype)
    options = dict(implementation=implementation, config=config if implementation == "fused" else None)
    assert_operator_isolated(chunk_gated_delta_rule, make, of, LENGTHS, **options)


@pytest.mark.parametrize("implementation", ["xla", "fused"])
def test_a_spoilt_sequence_stays_so(implementation):
    """From the first chunk that is not finite to its last token, over chunks that it shares and chunks of its own."""
    x = make_inputs(1, 52, 1, 2, 16, 16)
    x["v"] = x["v"].at[0, 6, 0, 3].set(jnp.nan)
    o, _ = chunk_gated_delta_rule(**x, cu_seqlens=boundaries(5, 40), chunk_size=16, implementation=implementation)
    spoilt = np.isnan(np.asarray(o[0])).any(axis=(1, 2))
    np.testing.assert_array_equal(spoilt, [5 <= t < 45 for t in range(52)])
