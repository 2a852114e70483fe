"""The gated delta rule against the float64 recurrence."""

import jax.numpy as jnp
import numpy as np
import pytest

from chunkwise.pipeline import chunk_gated_delta_rule, recurrent_gated_delta_rule
from chunkwise.shared.testing.compare import TOLERANCE, assert_close, error
from chunkwise.shared.testing.inputs import make_inputs
from chunkwise.shared.testing.oracle import reference
from tests.recurrence import assert_recurrence

IMPLEMENTATIONS = ("xla", "staged")
all_implementations = pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
all_types = pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
PACKED = jnp.array([0, 1, 1, 36, 69, 69, 133, 140], jnp.int32)  # 1 token, empty ones, tails, 7 tokens of padding
THOROUGH = dict(
    test_nothing_is_forgotten=True,
    # The packages test their stages at such sizes.
    test_heads_and_dimensions=True,
    # Plain JAX has no blocks and no lanes for a size to fit into.
    test_lengths_and_chunk_sizes=lambda implementation, T: implementation == "xla" or T != 1,
    # The package of the fused kernel has a pack in plain JAX.
    test_packed_with_states=lambda implementation, dtype: implementation == "xla" or dtype == jnp.bfloat16,
)


def compare(inputs, operator=chunk_gated_delta_rule, **options):
    """Compare output and final state with the recurrence."""
    assert_recurrence(operator, inputs, gradients=False, **options)


@pytest.mark.parametrize(("T", "chunk_size"), [(1, 16), (64, 64), (130, 128)])
@all_implementations
def test_lengths_and_chunk_sizes(implementation, T, chunk_size):
    compare(make_inputs(2, T, 2, 2, 16, 16, num_states=2), implementation=implementation, chunk_size=chunk_size)


@pytest.mark.parametrize(("H", "HV", "K", "V"), [(1, 2, 1, 60), (1, 2, 100, 1), (1, 2, 256, 128), (2, 6, 16, 16)])
@all_implementations
def test_heads_and_dimensions(implementation, H, HV, K, V):
    compare(make_inputs(1, 70, H, HV, K, V, num_states=1), implementation=implementation)


@all_types
@pytest.mark.parametrize("gate", ["logsigmoid", "spikes", "zero"])
@all_implementations
def test_packed_with_states(implementation, gate, dtype):
    inputs = make_inputs(1, 147, 1, 2, 32, 48, dtype=dtype, gate=gate, num_states=len(PACKED) - 1)
    compare(inputs, implementation=implementation, cu_seqlens=PACKED, chunk_size=32)


@pytest.mark.parametrize("packed", [False, True])
def test_recurrent(packed):
    cu_seqlens = PACKED if packed else None
    inputs = make_inputs(1, 147, 2, 4, 32, 48, num_states=7 if packed else 1, normalise=False)
    compare(inputs, recurrent_gated_delta_rule, cu_seqlens=cu_seqlens, use_qk_l2norm_in_kernel=True)


def test_recurrent_continues_chunked():
    inputs = make_inputs(2, 71, 1, 2, 16, 16)
    prompt, token = ({name: x[:, cut] for name, x in inputs.items()} for cut in (slice(70), slice(70, None)))
    _, state = chunk_gated_delta_rule(**prompt, output_final_state=True, implementation="xla")
    o, _ = recurrent_gated_delta_rule(**token, initial_state=state)
    assert_close("o", o, reference(**inputs)[0][:, 70:], TOLERANCE["float32"])


def test_nothing_is_forgotten():
    """Reflections of the state without a decay: after 8,192 tokens within the limit, and no linear growth after it."""
    T, K, V = 32_768, 16, 8
    rng = np.random.default_rng(0)
    unit = lambda x: x / np.linalg.norm(x, axis=-1, keepdims=True)
    q, k = (unit(rng.standard_normal((T, K))).astype(np.float32) for _ in range(2))
    v = rng.standard_normal((T, V)).astype(np.float32)
    S, expected = np.zeros((K, V)), np.zeros((T, V))
    for t, (q_t, k_t, v_t) in enumerate(zip(*(y.astype(np.float64) for y in (q, k, v)), strict=True)):
        S = S + 2.0 * np.outer(k_t, v_t - S.T @ k_t)
        expected[t] = S.T @ q_t
    rows = [jnp.asarray(y)[None, :, None] for y in (q, k, v)]
    g, beta = jnp.zeros((1, T, 1)), jnp.full((1, T, 1), 2.0)
    o = chunk_gated_delta_rule(*rows, g, beta, 1.0, implementation="xla")[0][0, :, 0]
    after = {n: error(o[:n], expected[:n]) for n in (8_192, T)}
    assert after[8_192] < TOLERANCE["float32"]
    assert after[T] < 3 * after[8_192]
