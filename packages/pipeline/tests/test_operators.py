"""Every operator under every implementation: outputs, states and gradients against the float64 recurrence."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from chunkwise import pipeline
from chunkwise.shared.testing import GRADIENT_TOLERANCE, TOLERANCE, assert_close, make_inputs, reference, spoil_padding

IMPLEMENTATIONS = ("xla", "staged", "fused")
OPERATORS = ("gated_delta_rule", "kda", "gla", "simple_gla")
PACKED = jnp.array([0, 1, 30, 30, 65], jnp.int32)  # 1 token, an empty sequence, tails, 5 tokens of padding


def operator_inputs(name, dtype=jnp.float32, states=0, gate="logsigmoid", normalise=True):
    """Return the inputs of an operator by argument name."""
    inputs = make_inputs(
        1, 70, 2, 2, 16, 24, dtype=dtype, gate=gate, per_channel=name in ("kda", "gla"), num_states=states,
        normalise=normalise,
    )  # fmt: skip
    if name.endswith("gla"):
        del inputs["beta"]
    if name == "simple_gla":
        inputs["g_gamma"] = jnp.array([-0.1, -0.5])
    return inputs


# Without packing all but these staged chains is tested elsewhere: by a package, or here for the gated delta rule.
@pytest.mark.parametrize(
    ("name", "implementation", "packed"),
    [
        *((name, implementation, True) for name in OPERATORS for implementation in IMPLEMENTATIONS),
        *((name, "staged", False) for name in OPERATORS[1:]),
    ],
)
def test_outputs_and_gradients(name, implementation, packed):
    """One program for gates of ordinary strength and for gates that forget everything."""
    options = {"cu_seqlens": PACKED} if packed else {}
    if not name.endswith("gla"):
        options["use_qk_l2norm_in_kernel"] = True
    rng = np.random.default_rng(1)

    @jax.jit
    def run(x, do, dht):
        operator = functools.partial(getattr(pipeline, f"chunk_{name}"), **options, output_final_state=True)
        outputs, pullback = jax.vjp(lambda x: operator(**x, chunk_size=32, implementation=implementation), x)
        return outputs, pullback((do, dht))[0]

    for gate in ("logsigmoid", "resets"):
        inputs = operator_inputs(name, states=4 if packed else 1, gate=gate, normalise=False)
        do, dht = (rng.standard_normal(inputs[x].shape).astype(np.float32) for x in ("v", "initial_state"))
        (o, state), grads = run(spoil_padding(inputs, options.get("cu_seqlens")), do, dht)
        o_ref, state_ref, expected = reference(**inputs, **options, do=do, dht=dht)
        assert_close("o", o, o_ref, TOLERANCE["float32"])
        assert_close("final_state", state, state_ref, TOLERANCE["float32"])
        assert grads.keys() == expected.keys()
        for argument, grad in grads.items():
            assert_close(f"d{argument}", grad, expected[argument], GRADIENT_TOLERANCE["float32"])


# The package tests the other two.
@pytest.mark.parametrize(("chunk_size", "packed"), [(16, True), (64, False)])
def test_gradient_of_strong_constant_gates_staged(chunk_size, packed):
    """Each head by itself: it is a sum of terms of e^g_gamma, beside others of 1 that do not depend on the gate."""
    inputs = make_inputs(1, 70, 3, 3, 8, 8, num_states=4 if packed else 1)
    del inputs["beta"], inputs["g"]
    gamma = jnp.array([-1.0, -5.0, -30.0])
    options = {"cu_seqlens": PACKED} if packed else {}
    rng = np.random.default_rng(1)
    do, dht = (rng.standard_normal(inputs[x].shape) for x in ("v", "initial_state"))

    def loss(gamma):
        o, state = pipeline.chunk_simple_gla(
            **inputs, g_gamma=gamma, **options, output_final_state=True, chunk_size=chunk_size,
            implementation="staged",
        )  # fmt: skip
        return jnp.sum(o * do) + jnp.sum(state * dht)

    want = reference(**inputs, g_gamma=gamma, **options, do=do, dht=dht)[2]["g_gamma"]
    got = jax.grad(loss)(gamma)
    for head, strength in enumerate(gamma):
        assert_close(f"dg_gamma at {strength}", got[head], want[head], GRADIENT_TOLERANCE["float32"])


@pytest.mark.parametrize("gate", ["spikes", "zero", "resets"])
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("name", OPERATORS)
def test_packed_without_states_in_bfloat16(name, implementation, gate):
    inputs = operator_inputs(name, jnp.bfloat16, gate=gate)
    o, state = getattr(pipeline, f"chunk_{name}")(
        **spoil_padding(inputs, PACKED), cu_seqlens=PACKED, implementation=implementation
    )
    assert state is None
    assert o.dtype == jnp.bfloat16
    assert_close("o", o, reference(**inputs, cu_seqlens=PACKED)[0], TOLERANCE["bfloat16"])


@pytest.mark.parametrize("implementation", [None, "xla"])
@pytest.mark.parametrize("name", OPERATORS)
def test_recurrent(name, implementation):
    inputs = operator_inputs(name, states=1)
    recurrent = getattr(pipeline, f"recurrent_{name}")
    o, state = recurrent(**inputs, output_final_state=True, implementation=implementation)
    o_ref, state_ref = reference(**inputs)
    assert_close("o", o, o_ref, TOLERANCE["float32"])
    assert_close("final_state", state, state_ref, TOLERANCE["float32"])


@pytest.mark.parametrize("name", ["gated_delta_rule", "kda"])
def test_recurrent_fused(name):
    inputs = {x: y[:, :2] if x != "initial_state" else y for x, y in operator_inputs(name, states=1).items()}
    recurrent = getattr(pipeline, f"recurrent_{name}")
    o, state = recurrent(**inputs, output_final_state=True, implementation="fused")
    o_ref, state_ref = reference(**inputs)
    assert_close("o", o, o_ref, TOLERANCE["float32"])
    assert_close("final_state", state, state_ref, TOLERANCE["float32"])


@pytest.mark.parametrize("name", OPERATORS)
def test_unknown_implementation(name):
    for kind in ("chunk", "recurrent"):
        with pytest.raises(ValueError, match=r"`implementation` must be None or one of .*; got 'cuda'"):
            getattr(pipeline, f"{kind}_{name}")(**operator_inputs(name), implementation="cuda")


@pytest.mark.parametrize("name", OPERATORS)
def test_what_the_token_by_token_form_does_not_come_as(name):
    for implementation in ("staged", "fused") if name.endswith("gla") else ("staged",):
        with pytest.raises(NotImplementedError, match=f"`recurrent_{name}` comes as 'xla'.*; got '{implementation}'"):
            getattr(pipeline, f"recurrent_{name}")(**operator_inputs(name), implementation=implementation)


@pytest.mark.parametrize("name", OPERATORS)
def test_scale_is_one_number(name):
    for kind in ("chunk", "recurrent"):
        with pytest.raises(ValueError, match="`scale` must be None, a number or a scalar array; got"):
            getattr(pipeline, f"{kind}_{name}")(**operator_inputs(name), scale=jnp.ones(24))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_equal_channels_reproduce_the_gated_delta_rule(implementation):
    inputs = operator_inputs("gated_delta_rule")
    expected, _ = pipeline.chunk_gated_delta_rule(**inputs, chunk_size=16, implementation="xla")
    inputs["g"] = jnp.broadcast_to(inputs["g"][..., None], (*inputs["g"].shape, 16))
    o, _ = pipeline.chunk_kda(**inputs, chunk_size=16, implementation=implementation)
    assert_close("o", o, expected, TOLERANCE["float32"])


@pytest.mark.parametrize("name", OPERATORS)
def test_one_whole_chunk_at_full_width(name):
    """A loop over one chunk gets unrolled; the products around it were once fused into garbage (see chunk_h/xla.py)."""
    for H in (1, 16):
        inputs = make_inputs(1, 64, H, H, 128, 128, per_channel=name in ("kda", "gla"))
        if name.endswith("gla"):
            del inputs["beta"]
        o, _ = getattr(pipeline, f"chunk_{name}")(**inputs, implementation="xla")
        assert_close("o", o, reference(**inputs)[0], TOLERANCE["float32"])
