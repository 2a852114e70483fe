"""The kernels, interpreted, against the float64 recurrence."""

import jax.numpy as jnp
import numpy as np
import pytest

from chunkwise.fused_gdn import Config, chunk_gated_delta_rule, recurrent_gated_delta_rule
from chunkwise.fused_gdn import config as tiles
from chunkwise.shared.kernels.matmul import emulate_mxu
from chunkwise.shared.testing.compare import TOLERANCE, assert_close, error
from chunkwise.shared.testing.inputs import GATES, make_inputs
from chunkwise.shared.testing.oracle import reference
from chunkwise.shared.tuning import VMEM_LIMIT_BYTES

DTYPES = (jnp.float32, jnp.bfloat16)
THOROUGH = dict(
    test_shapes_with_states=lambda C: C < 128,
    # The edges of the pipeline have these.
    test_every_gate_and_repeated_keys=True,
    test_error_is_below_one_pass_of_the_matrix_unit=True,
    test_packed_stream=True,
    test_decode_continues_a_chunked_prefix=True,
    test_packed_with_states=True,
    test_no_leak_between_heads_rows_and_sequences=True,
)


def check(x, **arguments):
    """Compare o and the final state with the oracle; what follows the last sequence of a pack is NaN."""
    end = x["v"].shape[1] if arguments.get("cu_seqlens") is None else int(arguments["cu_seqlens"][-1])
    x = {n: y if n == "initial_state" else y.at[:, end:].set(jnp.nan) for n, y in x.items()}
    o, state = chunk_gated_delta_rule(**x, **arguments, implementation="fused")
    known = ("cu_seqlens", "scale", "use_qk_l2norm_in_kernel")
    want_o, want_state = reference(**x, **{n: a for n, a in arguments.items() if n in known})
    tolerance = TOLERANCE[x["q"].dtype.name]
    assert o.dtype == x["v"].dtype
    assert not o[:, end:].any()
    assert_close("o", o, want_o, tolerance)
    if arguments.get("output_final_state"):
        assert_close("final_state", state, want_state, tolerance)
    else:
        assert state is None


def rows(*inputs):
    """Return inputs of one row as the rows of a batch."""
    return {name: jnp.concatenate([x[name] for x in inputs]) for name in inputs[0]}


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_gate_and_repeated_keys(dtype):
    kinds = [dict(gate=gate) for gate in GATES]
    kinds += [dict(repeat_key=True, beta=beta, gate=gate) for beta in (1.0, 1.9) for gate in ("zero", "spikes")]
    inputs = [make_inputs(1, 200, 1, 2, 128, 128, dtype=dtype, seed=i, **kind) for i, kind in enumerate(kinds)]
    o, _ = chunk_gated_delta_rule(**rows(*inputs), implementation="fused")
    for i, x in enumerate(inputs):
        assert_close(str(kinds[i]), o[i : i + 1], reference(**x)[0], TOLERANCE[x["q"].dtype.name])


@pytest.mark.parametrize(
    ("dtype", "C", "T", "H", "HV", "K", "V"),
    [
        (jnp.float32, 16, 37, 1, 3, 60, 100),
        (jnp.bfloat16, 32, 70, 2, 4, 64, 256),
        (jnp.float32, 64, 1, 2, 2, 1, 130),
        (jnp.bfloat16, 128, 130, 1, 2, 256, 128),
    ],
)
def test_shapes_with_states(dtype, C, T, H, HV, K, V):
    x = make_inputs(2, T, H, HV, K, V, dtype=dtype, num_states=2, normalise=False)
    check(x, chunk_size=C, output_final_state=True, use_qk_l2norm_in_kernel=True, scale=0.3)


def test_packed_stream():
    """Chunks hold several sequences; the tokens after the last one are padding."""
    x = make_inputs(1, 210, 1, 2, 64, 64, dtype=jnp.bfloat16, gate="spikes")
    check(x, cu_seqlens=jnp.array([0, 1, 64, 64, 70, 128, 200], jnp.int32))


def test_packed_with_states():
    """The first sequence and the fourth are empty."""
    x = make_inputs(1, 210, 1, 2, 64, 64, num_states=7)
    check(x, cu_seqlens=jnp.array([0, 0, 1, 64, 64, 70, 128, 200], jnp.int32), output_final_state=True)


def test_no_leak_between_heads_rows_and_sequences():
    """A head, a row of the batch and a packed sequence give what they give alone.

    To the rounding of float32, 1e-6: other heads beside them change the order of sums.
    """
    x = make_inputs(2, 50, 2, 4, 32, 32)
    run = lambda x, **a: chunk_gated_delta_rule(**x, **a, chunk_size=16, implementation="fused")[0]
    together = run(x, config=Config(heads=2, heads_bwd=2))
    # Two value heads in two steps, so that their key head is repeated.
    alone = run({n: y[1:, :, y.shape[2] // 2 :] for n, y in x.items()}, config=Config(heads=1, heads_bwd=1))
    assert_close("alone", together[1:, :, 2:], alone, 1e-6)
    packed = {n: jnp.concatenate([y[:1], y[1:]], axis=1) for n, y in x.items()}
    packed = run(packed, cu_seqlens=jnp.array([0, 50, 100], jnp.int32), config=Config(heads=2, heads_bwd=2))
    assert_close("packed", packed[:, 50:], together[1:], 1e-6)


@pytest.mark.parametrize(
    ("H", "HV", "C", "K", "heads", "repeats"),
    [
        (16, 32, 64, 128, 32, 1),
        (1, 64, 64, 128, 32, 2),
        (2, 96, 64, 128, 24, 2),
        (1, 12, 128, 256, 6, 2),
        (7, 7, 16, 128, 7, 1),
    ],
)
def test_heads_of_a_step_fit_into_vmem(H, HV, C, K, heads, repeats):
    """A group of value heads too large for one step is cut, and its key head repeated."""
    config = tiles.default_for(H, HV, C, K, K)
    assert config == Config(heads, heads)
    assert tiles.key_repeats(H, HV, config) == repeats
    assert heads * tiles.vmem_bytes_per_head(C, K, K) <= tiles.VMEM_BUDGET < VMEM_LIMIT_BYTES


def test_decode_from_a_pool():
    """Three sequences of a pack, the second of them in a freed slot; shared has the tests of the kernel."""
    x = make_inputs(1, 5, 2, 4, 60, 128, num_states=7, normalise=False)
    x["g"] = x["g"].at[:, 4].set(-jnp.inf)
    cu_seqlens, slots = jnp.array([0, 1, 3, 5], jnp.int32), jnp.array([6, 2, 5], jnp.int32)
    pool, kept = x.pop("initial_state"), jnp.array([True, False, True])
    options = dict(cu_seqlens=cu_seqlens, use_qk_l2norm_in_kernel=True)
    want_o, want = reference(**x, **options, initial_state=pool[slots] * kept[:, None, None, None])
    o, after = recurrent_gated_delta_rule(
        **x, **options, initial_state=pool, output_final_state=True, state_indices=slots, has_initial_state=kept,
        implementation="fused",
    )  # fmt: skip
    assert_close("o", o, want_o, TOLERANCE["float32"])
    assert_close("states", after[slots], want, TOLERANCE["float32"])
    np.testing.assert_array_equal(np.delete(after, slots, 0), np.delete(pool, slots, 0))


def test_decode_continues_a_chunked_prefix():
    x = make_inputs(2, 21, 1, 2, 32, 32)
    prefix, rest = ({n: y[:, at] for n, y in x.items()} for at in (slice(0, 18), slice(18, 21)))
    _, state = chunk_gated_delta_rule(**prefix, output_final_state=True, chunk_size=16, implementation="fused")
    o, _ = recurrent_gated_delta_rule(**rest, initial_state=state, implementation="fused")
    assert_close("o", o, reference(**x)[0][:, 18:], TOLERANCE["float32"])


def test_error_is_below_one_pass_of_the_matrix_unit():
    """The tolerance can tell: a kernel whose float32 products took one pass would miss it by far."""
    # Other tests must not use these sizes: JAX remembers what it traced.
    x = make_inputs(1, 43, 1, 1, 32, 32)
    run = lambda C: chunk_gated_delta_rule(**x, chunk_size=C, implementation="fused")[0]
    want = reference(**x)[0]
    assert_close("o", run(32), want, TOLERANCE["float32"])
    with emulate_mxu(passes=1):
        one_pass = run(16)
    assert error(one_pass, want) > 10 * TOLERANCE["float32"]
