"""Raw gates, of which the kernels make decays: values and gradients against float64."""

import jax.numpy as jnp
import pytest

from chunkwise.kda import chunk_kda
from chunkwise.shared.testing.inputs import boundaries, make_inputs
from tests.laws import raw_inputs
from tests.poison import assert_isolated
from tests.recurrence import assert_recurrence

# 1 token, an empty sequence, two sequences in a chunk, padding in the last chunk.
PACKED = boundaries(1, 17, 0, 3)
THOROUGH = dict(
    test_values_and_gradients=lambda dtype, bound: (dtype, bound) != (jnp.float32, -5.0),
    test_isolated=True,
)


@pytest.mark.parametrize(
    ("dtype", "bound", "T", "cu_seqlens", "states", "A_log"),
    [
        # Fewer tokens than a chunk: the law makes decays of the zeros that pad it.
        (jnp.float32, None, 5, None, 2, None),
        (jnp.float32, -5.0, 24, PACKED, 4, None),
        (jnp.bfloat16, None, 24, PACKED, 0, None),
        (jnp.bfloat16, -5.0, 20, None, 2, None),
        # A short form of the softplus, whose small values a large rate shows.
        (jnp.bfloat16, None, 20, None, 2, (13.0, 17.0)),
        (jnp.bfloat16, None, 20, None, 2, (5.0, 100.0)),
    ],
)
def test_values_and_gradients(dtype, bound, T, cu_seqlens, states, A_log):
    B = 1 if cu_seqlens is not None else 2
    inputs = make_inputs(B, T, 1, 2, 8, 8, per_channel=True, dtype=dtype, num_states=states)
    assert_recurrence(
        chunk_kda, raw_inputs(inputs, dtype=dtype, A_log=A_log), use_gate_in_kernel=True, lower_bound=bound,
        use_beta_sigmoid_in_kernel=True, cu_seqlens=cu_seqlens, chunk_size=16, implementation="fused",
    )  # fmt: skip


@pytest.mark.parametrize("states", [0, 4])
def test_isolated(states):
    """A_log and dt_bias are of all sequences, so their gradients are sums over these."""
    x = raw_inputs(make_inputs(1, 24, 1, 1, 8, 8, per_channel=True, num_states=states))
    law = dict(use_gate_in_kernel=True, lower_bound=-5.0, use_beta_sigmoid_in_kernel=True)

    def run(x, cu_seqlens):
        o, state = chunk_kda(
            **x, **law, output_final_state=states > 0, cu_seqlens=cu_seqlens, chunk_size=16, implementation="fused"
        )
        return dict(o=o, final_state=state) if states else dict(o=o)

    assert_isolated(run, x, PACKED, shared=("A_log", "dt_bias"))
