"""What must hold of the operator whatever the numbers are."""

import jax.numpy as jnp
import numpy as np
import pytest

from chunkwise.kda import chunk_kda, recurrent_kda
from chunkwise.shared.testing.compare import STAGE_TOLERANCE, TOLERANCE, assert_close
from chunkwise.shared.testing.inputs import boundaries, make_inputs
from chunkwise.shared.testing.oracle import reference

both = pytest.mark.parametrize("implementation", ["xla", "fused"])
T, HALF = 42, 21  # lengths and options that the tests share, because a program is compiled once for them
OPTIONS = dict(output_final_state=True, chunk_size=16)
THOROUGH = dict(
    test_beta_zero_is_plain_decay=True,
    test_orthonormal_keys_recall_their_values=True,
    test_linear_in_v=True,
    test_equal_channels_are_the_gated_delta_rule=True,
    # The pipeline has decodes after a prefill.
    test_decoding_continues_a_prefill=True,
    # A decode that continues a prefill gets its state too.
    test_split_in_two_with_the_state_handed_over=True,
    test_alone_batched_and_packed_agree=True,
)


def inputs_of(B=1, T=T, **options):
    return make_inputs(B, T, 1, 2, 16, 16, **dict(per_channel=True, num_states=B) | options)


def run(x, implementation):
    return chunk_kda(**x, implementation=implementation, **OPTIONS)


@both
def test_linear_in_v(implementation):
    x = inputs_of()
    x["initial_state"] = jnp.zeros_like(x["initial_state"])
    other = np.random.default_rng(1).standard_normal(x["v"].shape).astype(np.float32)
    of = lambda v: run(x | {"v": v}, implementation)[0]
    assert_close("o", of(2.0 * x["v"] + 3.0 * other), 2.0 * of(x["v"]) + 3.0 * of(other), STAGE_TOLERANCE)


@both
def test_beta_zero_is_plain_decay(implementation):
    x = inputs_of(beta=0.0)
    o, state = run(x, implementation)
    decay = np.exp(np.cumsum(x["g"][0], axis=0))
    decayed = decay[..., None] * np.asarray(x["initial_state"][0])
    assert_close("o", o[0], np.einsum("tk,thkv->thv", x["q"][0, :, 0], decayed) / 4, TOLERANCE["float32"])
    assert_close("final_state", state[0], decayed[-1], TOLERANCE["float32"])


@both
def test_orthonormal_keys_recall_their_values(implementation):
    """g = 0 and beta = 1: the first 16 tokens store values, the next ask for them in another order."""
    x = inputs_of(gate="zero")
    basis = np.linalg.qr(np.random.default_rng(2).standard_normal((16, 16)))[0].astype(np.float32)
    order = np.random.default_rng(3).permutation(16)
    x["k"] = jnp.asarray(np.concatenate([basis, basis, basis[:10]]))[None, :, None]
    x["q"] = jnp.asarray(np.concatenate([basis, basis[order], basis[:10]]))[None, :, None]
    x["beta"] = jnp.asarray(np.repeat([1.0, 0.0], [16, 26]), jnp.float32)[None, :, None].repeat(2, axis=2)
    o, _ = run(x, implementation)
    assert_close("o", 4 * o[0, 16:32], np.asarray(x["v"])[0, order], STAGE_TOLERANCE)


@both
def test_equal_channels_are_the_gated_delta_rule(implementation):
    """The oracle with one gate per head is the gated delta rule."""
    x = inputs_of(per_channel=False)
    o, _ = run(x | {"g": jnp.repeat(x["g"][..., None], 16, -1)}, implementation)
    assert_close("o", o, reference(**x)[0], STAGE_TOLERANCE)


@both
def test_split_in_two_with_the_state_handed_over(implementation):
    x = inputs_of()
    o, state = run(x, implementation)
    tokens, start = {k: v for k, v in x.items() if k != "initial_state"}, x["initial_state"]
    left, middle = run({k: v[:, :HALF] for k, v in tokens.items()} | {"initial_state": start}, implementation)
    right, final = run({k: v[:, HALF:] for k, v in tokens.items()} | {"initial_state": middle}, implementation)
    assert_close("o", jnp.concatenate([left, right], 1), o, STAGE_TOLERANCE)
    assert_close("final_state", final, state, STAGE_TOLERANCE)


@both
def test_alone_batched_and_packed_agree(implementation):
    x = inputs_of(2, HALF)
    x["initial_state"] = jnp.zeros_like(x["initial_state"])
    batched, _ = run(x, implementation)
    alone, _ = run({k: v[1:] for k, v in x.items()}, implementation)
    assert_close("alone", alone, batched[1:], STAGE_TOLERANCE)
    stream = {k: v.reshape(1, T, *v.shape[2:]) for k, v in x.items() if k != "initial_state"}
    packed, _ = chunk_kda(**stream, cu_seqlens=boundaries(HALF, HALF), chunk_size=16, implementation=implementation)
    assert_close("packed", packed.reshape(batched.shape), batched, STAGE_TOLERANCE)


@both
def test_decoding_continues_a_prefill(implementation):
    x = inputs_of(T=HALF + 3)
    tokens = {k: v for k, v in x.items() if k != "initial_state"}
    prefix, S = run({k: v[:, :HALF] for k, v in tokens.items()} | {"initial_state": x["initial_state"]}, implementation)
    o = [prefix]
    for t in range(HALF, HALF + 3):
        token, S = recurrent_kda(
            **{k: v[:, t : t + 1] for k, v in tokens.items()}, initial_state=S, output_final_state=True,
            implementation=implementation,
        )  # fmt: skip
        o.append(token)
    o_ref, state = reference(**x)
    assert_close("o", jnp.concatenate(o, 1), o_ref, TOLERANCE["float32"])
    assert_close("final_state", S, state, TOLERANCE["float32"])
