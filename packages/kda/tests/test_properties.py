"""What must hold of the operator whatever the numbers are."""

import jax.numpy as jnp
import numpy as np
import pytest

from chunkwise.kda import fused_chunk_kda, recurrent_kda
from chunkwise.shared.reference import reference
from chunkwise.shared.testing import assert_close, boundaries, make_inputs

both = pytest.mark.parametrize("implementation", ["xla", "pallas"])
SMALL = dict(chunk_size=16)


def inputs_of(*sizes, **options):
    return make_inputs(*sizes, per_channel=True, **options)


@both
def test_linear_in_v(implementation):
    x = inputs_of(1, 40, 1, 1, 16, 16)
    other = np.random.default_rng(1).standard_normal(x["v"].shape).astype(np.float32)
    run = lambda v: fused_chunk_kda(**x | {"v": v}, implementation=implementation, **SMALL)[0]
    assert_close("o", run(2.0 * x["v"] + 3.0 * other), 2.0 * run(x["v"]) + 3.0 * run(other), 1e-6)


@both
def test_beta_zero_is_plain_decay(implementation):
    x = inputs_of(1, 40, 1, 1, 16, 16, beta=0.0, num_states=1)
    o, state = fused_chunk_kda(**x, output_final_state=True, implementation=implementation, **SMALL)
    decay = np.exp(np.cumsum(x["g"][0, :, 0], axis=0))
    decayed = decay[:, :, None] * np.asarray(x["initial_state"][0, 0])
    assert_close("o", o[0, :, 0], np.einsum("tk,tkv->tv", x["q"][0, :, 0], decayed) / 4, 1e-5)
    assert_close("final_state", state[0, 0], decayed[-1], 1e-5)


@both
def test_orthonormal_keys_recall_their_values(implementation):
    """g = 0 and beta = 1: the first 16 tokens store values, the next ask for them in another order."""
    x = inputs_of(1, 40, 1, 1, 16, 16, gate="zero")
    basis = np.linalg.qr(np.random.default_rng(2).standard_normal((16, 16)))[0].astype(np.float32)
    order = np.random.default_rng(3).permutation(16)
    x["k"] = jnp.asarray(np.concatenate([basis, basis, basis[:8]]))[None, :, None]
    x["q"] = jnp.asarray(np.concatenate([basis, basis[order], basis[:8]]))[None, :, None]
    x["beta"] = jnp.asarray(np.repeat([1.0, 0.0], [16, 24]), jnp.float32)[None, :, None]
    o, _ = fused_chunk_kda(**x, implementation=implementation, **SMALL)
    assert_close("o", 4 * o[0, 16:32, 0], np.asarray(x["v"])[0, order, 0], 1e-6)


@both
def test_equal_channels_are_the_gated_delta_rule(implementation):
    """The oracle with one gate per head is the gated delta rule."""
    x = make_inputs(1, 40, 1, 1, 16, 16)
    o, _ = fused_chunk_kda(**x | {"g": jnp.repeat(x["g"][..., None], 16, -1)}, implementation=implementation, **SMALL)
    assert_close("o", o, reference(**x)[0], 1e-6)


@both
def test_split_in_two_with_the_state_handed_over(implementation):
    x = inputs_of(1, 42, 1, 1, 16, 16, num_states=1)
    options = dict(output_final_state=True, implementation=implementation, **SMALL)
    o, state = fused_chunk_kda(**x, **options)
    tokens, start = {k: v for k, v in x.items() if k != "initial_state"}, x["initial_state"]
    left, middle = fused_chunk_kda(**{k: v[:, :21] for k, v in tokens.items()}, initial_state=start, **options)
    right, final = fused_chunk_kda(**{k: v[:, 21:] for k, v in tokens.items()}, initial_state=middle, **options)
    assert_close("o", jnp.concatenate([left, right], 1), o, 1e-6)
    assert_close("final_state", final, state, 1e-6)


@both
def test_alone_batched_and_packed_agree(implementation):
    x = inputs_of(2, 21, 1, 2, 16, 16)
    run = lambda **y: fused_chunk_kda(**y, implementation=implementation, **SMALL)[0]
    batched = run(**x)
    packed = run(**{k: v.reshape(1, 42, *v.shape[2:]) for k, v in x.items()}, cu_seqlens=boundaries(21, 21))
    assert_close("packed", packed.reshape(batched.shape), batched, 1e-6)
    assert_close("alone", run(**{k: v[1:] for k, v in x.items()}), batched[1:], 1e-6)


@both
def test_decoding_continues_a_prefill(implementation):
    x = inputs_of(2, 40, 1, 2, 16, 16)
    options = dict(output_final_state=True, implementation=implementation)
    prefix, S = fused_chunk_kda(**{k: v[:, :37] for k, v in x.items()}, **options, **SMALL)
    tokens = [prefix]
    for t in range(37, 40):
        token, S = recurrent_kda(**{k: v[:, t : t + 1] for k, v in x.items()}, initial_state=S, **options)
        tokens.append(token)
    o, state = reference(**x)
    assert_close("o", jnp.concatenate(tokens, 1), o, 1e-5)
    assert_close("final_state", S, state, 1e-5)
