"""What is not finite in one sequence must not change one bit of another, nor of another row of a batch."""

import jax.numpy as jnp
import pytest

from chunkwise.kda import chunk_kda
from chunkwise.shared.testing.inputs import boundaries, make_inputs
from tests.poison import assert_isolated

# An empty sequence, three in one chunk, one over three chunks that ends inside a block of 8 rows, and padding.
PACKED = boundaries(3, 0, 4, 30, 13)
T_PACKED = 52
# The gated delta rule, whose grid steps keep sequences apart in the same way, has a quick case.
THOROUGH = dict(test_isolated=True)


@pytest.mark.parametrize("implementation", ["xla", "fused"])
@pytest.mark.parametrize(
    ("of", "dtype", "bound"),
    [
        ("rows", jnp.float32, None),
        ("sequences", jnp.float32, None),
        ("stream", jnp.float32, None),
        # One product over blocks of 8 rows, in the backward too, or in the forward of bfloat16 alone.
        ("stream", jnp.float32, -5.0),
        ("stream", jnp.bfloat16, None),
    ],
)
def test_isolated(of, dtype, bound, implementation):
    """Heads of one sequence may spoil one another: `chunk_kda` says so."""
    states, cu_seqlens = of != "stream", None if of == "rows" else PACKED
    B, T, N = (2, 20, 2) if of == "rows" else (1, T_PACKED, len(PACKED) - 1)
    x = make_inputs(B, T, 1, 2, 16, 8, dtype=dtype, per_channel=True, num_states=N if states else 0)
    x["g"] = jnp.maximum(x["g"], -5.0)

    def run(x, cu_seqlens):
        o, state = chunk_kda(
            **x, output_final_state=states, min_gate=bound, cu_seqlens=cu_seqlens, chunk_size=16,
            implementation=implementation,
        )  # fmt: skip
        return dict(o=o, final_state=state) if states else dict(o=o)

    assert_isolated(run, x, cu_seqlens)
