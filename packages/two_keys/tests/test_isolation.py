"""What is not finite in one sequence must not change one bit of another, nor of another row of a batch."""

import jax.numpy as jnp
import pytest

from chunkwise.shared.testing.inputs import boundaries
from tests.either_two_keys import KINDS
from tests.poison import assert_isolated

PACKED = boundaries(3, 0, 4, 30, 13)
T_PACKED = 52
THOROUGH = dict(
    # The gated delta rule, whose grid steps keep sequences apart in the same way, has a quick case.
    test_isolated=True,
)


@pytest.mark.parametrize("implementation", ["xla", "fused"])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("of", ["rows", "sequences", "stream"])
@pytest.mark.parametrize("kind", KINDS)
def test_isolated(kind, of, dtype, implementation):
    states, cu_seqlens = of != "stream", None if of == "rows" else PACKED
    B, T, N = (2, 20, 2) if of == "rows" else (1, T_PACKED, len(PACKED) - 1)
    x = KINDS[kind].inputs(B, T, 1, 2, 16, 8, dtype=dtype, num_states=N if states else 0)

    def run(x, cu_seqlens):
        o, state = KINDS[kind].chunk(
            **x, output_final_state=states, cu_seqlens=cu_seqlens, chunk_size=16, implementation=implementation
        )
        return dict(o=o, final_state=state) if states else dict(o=o)

    assert_isolated(run, x, cu_seqlens)
