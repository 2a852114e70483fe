"""Kimi delta attention against the float64 recurrence, with the same rounded inputs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from chunkwise.kda import Config, chunk_kda, recurrent_kda
from chunkwise.kda.config import default_for
from chunkwise.shared.testing.compare import GATE_GRADIENT_TOLERANCE, GRADIENT_TOLERANCE, STAGE_TOLERANCE, assert_close
from chunkwise.shared.testing.inputs import boundaries, make_inputs
from chunkwise.shared.testing.oracle import reference
from chunkwise.shared.tuning import find_order
from tests.laws import NO_LAW, strong_raw_inputs
from tests.recurrence import assert_recurrence

both = pytest.mark.parametrize("implementation", ["xla", "fused"])
types = pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
PACKED = boundaries(1, 0, 0, 17, 16, 0, 20, 3)  # empty sequences, also in a row, tails, several sequences in a chunk
T_PACKED = 62  # 5 tokens of padding

# To compile a program takes seconds, so that tests share theirs: B, T, H, HV, K, V.
CHUNKS_OF_16 = (2, 41, 1, 2, 16, 24)
PACKED_SIZES = (1, T_PACKED, 2, 2, 16, 24)
# Gradients at chunk 64, with two heads side by side in the lanes.
SIZES_64 = (1, 70, 1, 2, 32, 48)
OPTIONS_64 = dict(use_qk_l2norm_in_kernel=True, scale=0.3)

# The kernels have a quick test of every kind; plain JAX, which computes in float32 whatever the types are, of fewer.
THOROUGH = dict(
    test_chunk_sizes_agree=True,
    test_the_step_that_is_measured=True,
    # The file of raw gates has gradients in bfloat16, but of gates that one product of 8 rows holds.
    test_gradients=lambda implementation, gate, dtype: (
        implementation == "xla" or (dtype == jnp.bfloat16 and gate != "strong")
    ),
    test_gradients_where_nothing_is_forgotten=True,
    test_gradients_of_strong_raw_gates=lambda dtype, strength: dtype == jnp.bfloat16 and strength == 30,
    test_min_gate_changes_nothing=True,
    # The kernels are compared with raw gates, and plain JAX in bfloat16.
    test_packed=True,
    # Behind a spike nothing is left of rows of other sequences, so gates of zero are quick in the kernels too.
    test_packed_bfloat16=lambda implementation, gate: (implementation, gate) == ("xla", "spikes"),
)

# What two ways to the same number may differ by if both compute in float32: a few of its roundings.
FLOAT32_ROUNDING = STAGE_TOLERANCE


def inputs_of(*sizes, **options):
    return make_inputs(*sizes, per_channel=True, **options)


def compare(inputs, operator=chunk_kda, **options):
    """Compare output and final state, and return both."""
    return assert_recurrence(operator, inputs, gradients=False, **options)


def compare_gradients(inputs, **options):
    """Compare output, final state and the gradients of all inputs, and return them."""
    return assert_recurrence(chunk_kda, inputs, **options)


@both
def test_chunk_sizes_agree(implementation):
    inputs = inputs_of(1, 35, 1, 1, 16, 16, num_states=1)
    results = [compare(inputs, implementation=implementation, chunk_size=C) for C in (16, 32, 64, 128)]
    # Each of the two may be off by its rounding.
    for result in results[1:]:
        for name, y in result.items():
            assert_close(name, y, results[0][name], 2 * FLOAT32_ROUNDING)


def test_the_step_that_is_measured():
    """16 heads a step, two side by side in the lanes, in the order that was searched for; two such blocks of heads."""
    assert default_for(32, 32, 64, 128, 128, itemsize=2) == Config(16, 16)
    assert find_order("chunkwise.kda", "fwd", (16, 64, 128), "") != ""
    inputs = inputs_of(2, 130, 16, 32, 8, 8, dtype=jnp.bfloat16)
    compare(inputs, implementation="fused")


def test_steps_share_a_key_head():
    """Two blocks of value heads on each of two key heads."""
    inputs = inputs_of(1, 20, 2, 8, 128, 64)
    compare_gradients(inputs, implementation="fused", chunk_size=16, config=Config(2, 2))


@types
@pytest.mark.parametrize("gate", ["logsigmoid", "strong", "spikes"])
@both
def test_gradients(implementation, gate, dtype):
    inputs = inputs_of(*CHUNKS_OF_16, dtype=dtype, gate=gate, num_states=2)
    compare_gradients(inputs, implementation=implementation, chunk_size=16)


def test_gradients_where_nothing_is_forgotten():
    """What a chunk passes to the one before is a sum of rows that nearly cancel, so they must keep their digits."""
    inputs = inputs_of(2, 256, 1, 2, 16, 24, dtype=jnp.bfloat16, num_states=2, gate="zero", beta=2.0, repeat_key=True)
    compare_gradients(inputs, implementation="fused", chunk_size=64)


@pytest.mark.parametrize("g", [-5.0, -30.0])
@both
def test_gradients_of_strong_constant_gates(implementation, g):
    """The gates' own gradients are e^g small: what no gate decays must not be added and taken away again."""
    inputs = inputs_of(*CHUNKS_OF_16, num_states=2)
    inputs["g"] = jnp.full_like(inputs["g"], g)
    compare_gradients(inputs, implementation=implementation, chunk_size=16)


@pytest.mark.parametrize(
    ("dtype", "strength", "limit"), [(jnp.float32, 30, 3e-6), (jnp.bfloat16, 1, 2e-2), (jnp.bfloat16, 30, 2e-2)]
)
def test_gradients_of_strong_raw_gates(dtype, strength, limit):
    """The gradient of A_log is a sum of decays times their gradients, which are small where decays are strong."""
    x = strong_raw_inputs(inputs_of(2, 48, 1, 2, 16, 8), strength, dtype)
    assert_recurrence(
        chunk_kda, x, but_for=NO_LAW, limit=lambda *_: limit, use_gate_in_kernel=True, chunk_size=16,
        implementation="fused",
    )  # fmt: skip


def test_gradients_of_small_cotangents():
    """No factor of a product is so small that gradients of 1e-15 underflow beside it."""
    x, options = inputs_of(*CHUNKS_OF_16, dtype=jnp.bfloat16), dict(chunk_size=16, implementation="fused")
    loss = lambda x, size: jnp.sum(chunk_kda(**x, **options)[0].astype(jnp.float32)) * size
    gradients = jax.jit(jax.grad(loss))
    plain, small = (gradients(x, jnp.float32(size)) for size in (1.0, 2.0**-50))
    for name, d in small.items():
        assert_close(name, d.astype(jnp.float32) * 2.0**50, plain[name].astype(jnp.float32), FLOAT32_ROUNDING)


# Plain JAX computes in float32 whatever the types are.
@pytest.mark.parametrize(
    ("implementation", "dtype"), [("xla", jnp.float32), ("fused", jnp.float32), ("fused", jnp.bfloat16)]
)
@pytest.mark.parametrize(("bound", "g"), [(-16.0, -16.0), (-16.0, -8.0), (-5.0, None)])
def test_min_gate_changes_nothing(implementation, bound, g, dtype):
    inputs = inputs_of(*SIZES_64, dtype=dtype, num_states=1, normalise=False)
    bounded = bound * jax.nn.sigmoid(5.0 * inputs["g"] + 5.0)
    inputs["g"] = bounded if g is None else jnp.full_like(bounded, g)
    free = compare_gradients(inputs, implementation=implementation, **OPTIONS_64)
    promised = compare_gradients(inputs, min_gate=bound, implementation=implementation, **OPTIONS_64)
    for name, x in free.items():
        if dtype == jnp.float32:
            # Computed in float32, with factors of another size.
            assert_close(name, promised[name], x, FLOAT32_ROUNDING)
        elif name in ("dq", "dk", "dg"):
            # The backward rounds its operands to bfloat16 after it has multiplied them by these factors.
            assert_close(
                name, promised[name], x, (GATE_GRADIENT_TOLERANCE if name == "dg" else GRADIENT_TOLERANCE)["bfloat16"]
            )
        else:
            np.testing.assert_array_equal(promised[name], x, err_msg=name)


def test_small_values_after_strong_gates():
    """A strong gate forgets a value that is much larger than the values after it, wherever it stands in 8 rows."""
    strong = [(2,), (2, 3), (1, 5, 9), (5, 6, 7)]
    B, T, K = 3 * len(strong), 12, 8
    g = np.zeros((3, len(strong), T))
    for n, rows in enumerate(strong):
        g[:, n, rows] = np.array([-20.0, -40.0, -86.0])[:, None]
    g = g.reshape(B, T)
    values = 2.0 ** (14 - 27 * np.cumsum(g < 0, axis=1))
    key = np.zeros((B, T, 1, K))
    key[..., 0] = 1.0
    x = {name: jnp.asarray(y, jnp.bfloat16) for name, y in dict(q=key, k=key).items()}
    x["v"] = jnp.asarray(np.broadcast_to(values[..., None, None], key.shape), jnp.bfloat16)
    x["g"] = jnp.asarray(np.broadcast_to(g[..., None, None], key.shape), jnp.float32)
    x["beta"] = jnp.full((B, T, 1), 0.5, jnp.bfloat16)
    o, _ = jax.jit(lambda x: chunk_kda(**x, scale=1.0, implementation="fused"))(x)
    # Every number by itself: a row and an output are rounded to bfloat16.
    np.testing.assert_allclose(np.asarray(o, np.float64), reference(**x, scale=1.0)[0], rtol=2.0**-7)


def packed_inputs(states, **options):
    return inputs_of(*PACKED_SIZES, num_states=len(PACKED) - 1 if states else 0, **options)


@pytest.mark.parametrize("gate", ["logsigmoid", "spikes", "zero"])
@pytest.mark.parametrize("states", [True, False])
@both
def test_packed(implementation, states, gate):
    inputs = packed_inputs(states, gate=gate)
    compare_gradients(inputs, cu_seqlens=PACKED, chunk_size=16, implementation=implementation)


@pytest.mark.parametrize("gate", ["spikes", "zero"])
@both
def test_packed_bfloat16(implementation, gate):
    inputs = packed_inputs(False, gate=gate, dtype=jnp.bfloat16)
    compare(inputs, cu_seqlens=PACKED, chunk_size=16, implementation=implementation)


@types
@both
def test_decode(implementation, dtype):
    compare(inputs_of(3, 3, 1, 2, 130, 7, dtype=dtype, num_states=3), recurrent_kda, implementation=implementation)
