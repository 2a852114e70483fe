"""Raw gates of decay, erasing and writing: values and gradients against float64."""

import jax.numpy as jnp
import pytest

from chunkwise.shared.testing.inputs import boundaries
from tests.either_two_keys import KINDS
from tests.laws import raw_inputs
from tests.recurrence import assert_recurrence

# The laws are those of kda, whose tests have them.
THOROUGH = dict(test_values_and_gradients=True)
SIGMOIDS = {"gdn2": ("erase", "write"), "comba": ("beta",)}


@pytest.mark.parametrize("form", ["chunk", "recurrent"])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("implementation", ["xla", "fused"])
@pytest.mark.parametrize("kind", KINDS)
def test_values_and_gradients(kind, implementation, dtype, form):
    """Erase gates and step sizes are doubled."""
    x = raw_inputs(KINDS[kind].inputs(1, 24, 1, 2, 8, 8, dtype=dtype, num_states=4), dtype=dtype)
    raw = dict.fromkeys((f"use_{name}_sigmoid_in_kernel" for name in SIGMOIDS[kind]), True)
    assert_recurrence(
        getattr(KINDS[kind], form), x, **raw, **dict(chunk_size=16) if form == "chunk" else {},
        use_gate_in_kernel=True, allow_neg_eigval=True, cu_seqlens=boundaries(1, 17, 0, 3),
        implementation=implementation,
    )  # fmt: skip
