"""Kimi delta attention against the float64 recurrence, with the same rounded inputs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from chunkwise.kda import Config, fused_chunk_kda, recurrent_kda
from chunkwise.shared.reference import reference
from chunkwise.shared.testing import (
    GATE_GRADIENT_TOLERANCE,
    GATES,
    GRADIENT_TOLERANCE,
    TOLERANCE,
    assert_close,
    boundaries,
    make_inputs,
)

both = pytest.mark.parametrize("implementation", ["xla", "pallas"])
types = pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
PACKED = boundaries(1, 0, 17, 16, 0, 20, 3)  # empty sequences, tails, several sequences in a chunk
T_PACKED = 62  # 5 tokens of padding
KEPT = ("cu_seqlens", "scale", "use_qk_l2norm_in_kernel")


def inputs_of(*sizes, **options):
    return make_inputs(*sizes, per_channel=True, **options)


def compare(inputs, operator=fused_chunk_kda, final_state=True, **options):
    """Run the operator and the oracle on the same inputs and compare output and final state."""
    o, state = operator(**inputs, output_final_state=final_state, **options)
    o_ref, state_ref = reference(**inputs, **{k: v for k, v in options.items() if k in KEPT})
    tolerance = TOLERANCE[str(inputs["v"].dtype)]
    assert o.dtype == inputs["v"].dtype
    assert_close("o", o, o_ref, tolerance)
    if final_state:
        assert state.dtype == jnp.float32
        assert_close("final_state", state, state_ref, tolerance)
    else:
        assert state is None


def compare_gradients(inputs, final_state=True, **options):
    """Compare the output and the gradients of all inputs, with a cotangent of the final state if there is one."""
    rng = np.random.default_rng(1)

    def run(inputs):
        return fused_chunk_kda(**inputs, output_final_state=final_state, **options)

    outputs, pullback = jax.vjp(run, inputs)
    do, dht = (None if x is None else jnp.asarray(rng.standard_normal(x.shape), x.dtype) for x in outputs)
    (gradients,) = pullback((do, dht))
    kept = {k: v for k, v in options.items() if k in KEPT}
    o_ref, _, expected = reference(**inputs, **kept, do=do, dht=dht)
    kind = str(inputs["v"].dtype)
    assert_close("o", outputs[0], o_ref, TOLERANCE[kind])
    for name, gradient in gradients.items():
        assert gradient.dtype == inputs[name].dtype
        tolerance = (GATE_GRADIENT_TOLERANCE if name in ("g", "beta") else GRADIENT_TOLERANCE)[kind]
        assert_close(f"d{name}", gradient, expected[name], tolerance)


@types
@pytest.mark.parametrize("gate", GATES)
@both
def test_gates(implementation, gate, dtype):
    """T leaves a tail; the gates range from none to -30 per token, also mixed in one chunk and from token to token."""
    compare(inputs_of(2, 70, 1, 2, 32, 48, dtype=dtype, gate=gate, num_states=2), implementation=implementation)


@types
@both
def test_constant_gates_mixed_over_channels(implementation, dtype):
    inputs = inputs_of(2, 70, 1, 2, 32, 48, dtype=dtype, num_states=2)
    inputs["g"] = jnp.broadcast_to(jnp.tile(jnp.array([0.0, -1e-3, -2.0, -30.0]), 8), inputs["g"].shape)
    compare(inputs, implementation=implementation)


@pytest.mark.parametrize(("T", "chunk_size"), [(1, 16), (35, 32), (35, 128)])
@both
def test_lengths_and_chunk_sizes(implementation, T, chunk_size):
    inputs = inputs_of(1, T, 1, 1, 16, 16, num_states=1)
    compare(inputs, implementation=implementation, chunk_size=chunk_size)


@pytest.mark.parametrize(("K", "V"), [(1, 60), (100, 1), (256, 200)])
@both
def test_head_dimensions(implementation, K, V):
    compare(inputs_of(1, 20, 1, 1, K, V, num_states=1), implementation=implementation, chunk_size=16)


# The last: two blocks of 8 packs, which have an order of their own.
@pytest.mark.parametrize(("H", "HV", "config"), [(1, 4, None), (20, 20, None), (16, 16, Config(8, 1))])
@both
def test_many_heads_batches_and_chunks_keep_their_states_apart(implementation, H, HV, config):
    inputs = inputs_of(2, 40, H, HV, 8, 8, num_states=2)
    compare(inputs, implementation=implementation, chunk_size=16, config=config)


@types
@both
def test_gates_no_product_could_hold(implementation, dtype):
    """Gates of 0, -20 and -200 side by side, in every channel another order: e^-G of a few rows is no number."""
    inputs = inputs_of(1, 64, 1, 1, 32, 32, dtype=dtype)
    inputs["g"] = jnp.asarray(
        np.random.default_rng(2).choice([0.0, -1e-3, -20.0, -200.0], inputs["g"].shape), jnp.float32
    )
    compare(inputs, implementation=implementation)
    compare_gradients(inputs, implementation=implementation)


@types
@pytest.mark.parametrize("gate", ["zero", "logsigmoid/10", "logsigmoid"])
@pytest.mark.parametrize("beta", [1.0, 1.9])
@both
def test_repeated_keys(implementation, beta, gate, dtype):
    inputs = inputs_of(1, 128, 1, 2, 64, 48, dtype=dtype, gate=gate, beta=beta, repeat_key=True)
    compare(inputs, implementation=implementation)


@pytest.mark.parametrize(("bound", "dtype"), [(-5.0, jnp.bfloat16), (-0.5, jnp.float32)])
@both
def test_gate_lower_bound_changes_nothing(implementation, bound, dtype):
    inputs = inputs_of(1, 64, 1, 1, 32, 32, dtype=dtype)
    inputs["g"] = bound * jax.nn.sigmoid(5.0 * inputs["g"] + 5.0)
    compare(inputs, implementation=implementation, gate_lower_bound=bound)


@both
def test_unnormalised_keys_with_l2norm_and_own_scale(implementation):
    inputs = inputs_of(1, 40, 1, 2, 24, 24, normalise=False)
    options = dict(implementation=implementation, chunk_size=16, use_qk_l2norm_in_kernel=True)
    compare(inputs, scale=0.37, **options)
    compare(inputs, scale=jnp.float32(0.37), final_state=False, **options)


@both
def test_unnormalised_keys(implementation):
    """Keys of length 3 with beta |k|^2 < 2: the interaction matrix is as large as the recurrence allows."""
    inputs = inputs_of(1, 40, 1, 2, 24, 24, beta=0.2)
    inputs["k"] = 3.0 * inputs["k"]
    compare(inputs, implementation=implementation, chunk_size=16)


@pytest.mark.parametrize("gate", ["spikes", "zero"])
@pytest.mark.parametrize(("states", "dtype"), [(True, jnp.float32), (False, jnp.float32), (False, jnp.bfloat16)])
@both
def test_packed(implementation, states, gate, dtype):
    N = len(PACKED) - 1 if states else 0
    inputs = inputs_of(1, T_PACKED, 1, 2, 16, 24, dtype=dtype, gate=gate, num_states=N)
    for name in ("q", "k", "v", "g", "beta"):  # what padding holds must not matter
        inputs[name] = inputs[name].at[:, int(PACKED[-1]) :].set(jnp.nan)
    o, state = fused_chunk_kda(
        **inputs, output_final_state=states, cu_seqlens=PACKED, chunk_size=16, implementation=implementation
    )
    clean = {k: jnp.nan_to_num(v) for k, v in inputs.items()}
    o_ref, state_ref = reference(**clean, cu_seqlens=PACKED)
    assert_close("o", o, o_ref, TOLERANCE[str(jnp.dtype(dtype))])
    if states:
        assert_close("final_state", state, state_ref, TOLERANCE[str(jnp.dtype(dtype))])


@types
@pytest.mark.parametrize("gate", ["logsigmoid", "strong", "spikes"])
@both
def test_gradients(implementation, gate, dtype):
    inputs = inputs_of(2, 23, 1, 2, 16, 24, dtype=dtype, gate=gate, num_states=2)
    compare_gradients(inputs, implementation=implementation, chunk_size=16)


@both
def test_gradients_at_chunk_64_with_norm_bound_and_repeated_keys(implementation):
    inputs = inputs_of(1, 70, 1, 1, 16, 16, repeat_key=True, normalise=False)
    options = dict(use_qk_l2norm_in_kernel=True, scale=0.3, gate_lower_bound=-5.0)
    compare_gradients(inputs, final_state=False, implementation=implementation, **options)


@pytest.mark.parametrize("states", [True, False])
@both
def test_gradients_of_packed_sequences(implementation, states):
    N = len(PACKED) - 1 if states else 0
    inputs = inputs_of(1, T_PACKED, 1, 2, 16, 24, num_states=N)
    compare_gradients(inputs, final_state=states, cu_seqlens=PACKED, chunk_size=16, implementation=implementation)


@types
@both
def test_decode(implementation, dtype):
    compare(inputs_of(3, 3, 1, 2, 130, 7, dtype=dtype, num_states=3), recurrent_kda, implementation=implementation)


@both
def test_packed_decode_from_a_pool(implementation):
    """The first sequence starts in a freed slot; shared has the tests of the kernel."""
    inputs = inputs_of(1, T_PACKED, 1, 2, 16, 24, num_states=10)
    slots, kept = jnp.array([4, 8, 0, 9, 1, 6, 3], jnp.int32), jnp.arange(7) > 0
    pool = inputs.pop("initial_state")
    o, after = recurrent_kda(
        **inputs, initial_state=pool, output_final_state=True, cu_seqlens=PACKED, state_indices=slots,
        has_initial_state=kept, implementation=implementation,
    )  # fmt: skip
    start = pool[slots] * kept[:, None, None, None]
    o_ref, state_ref = reference(**inputs, initial_state=start, cu_seqlens=PACKED)
    assert_close("o", o, o_ref, TOLERANCE["float32"])
    assert_close("states", after[slots], state_ref, TOLERANCE["float32"])
    np.testing.assert_array_equal(np.delete(after, slots, 0), np.delete(pool, slots, 0))


@pytest.mark.parametrize("g", [-5.0, -30.0])
@both
def test_gradients_of_strong_constant_gates(implementation, g):
    """The gates' own gradients are e^g small: what no gate decays must not be added and taken away again."""
    inputs = inputs_of(1, 41, 1, 1, 16, 16, num_states=1)
    inputs["g"] = jnp.full_like(inputs["g"], g)
    compare_gradients(inputs, implementation=implementation, chunk_size=16)
