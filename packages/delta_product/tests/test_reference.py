"""Gated DeltaProduct against its definition in float64: values, all gradients, serving steps."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from chunkwise.delta_product import (
    chunk_gated_delta_product,
    ragged_gated_delta_product,
    recurrent_gated_delta_product,
)
from chunkwise.fused_gdn import chunk_gated_delta_rule
from chunkwise.shared.serving import state_pool
from chunkwise.shared.testing import definitions
from chunkwise.shared.testing.compare import assert_close
from chunkwise.shared.testing.inputs import make_product_inputs, poison_padding
from tests.composition_suite import (
    FORMS,
    CompositionTests,
    Kind,
    assert_steps,
    assert_values_and_gradients,
    implementations,
)

THOROUGH = dict(
    test_other_numbers_of_steps=lambda n, implementation: (n, implementation) == (4, "fused"),
    test_four_steps=True,
    test_raw_gates=lambda form: form in ("rows", "stream"),
)


def kind(n: int, **static) -> Kind:
    """Return the operator of n steps a token."""
    return Kind(
        chunk_gated_delta_product, recurrent_gated_delta_product, ragged_gated_delta_product,
        definitions.GATED_DELTA_PRODUCT, functools.partial(make_product_inputs, n=n), ("g", "beta"),
        dict(num_householder=n) | static,
    )  # fmt: skip


class TestDeltaProduct(CompositionTests):
    kind, raw = kind(2), kind(2, use_qk_l2norm_in_kernel=True)


@pytest.mark.parametrize(("n", "implementation"), [(1, "xla"), (3, "xla"), (3, "fused"), (4, "fused")])
def test_other_numbers_of_steps(n, implementation):
    """One key for all tokens, and step sizes near 2, are the worst case. No chunk has a whole number of 3 tokens."""
    of_32 = kind(n, chunk_size=32)
    assert_values_and_gradients(of_32, "chunk", "sequences", implementation, repeat_key=True, beta=1.9)


def test_one_step():
    """It is the gated delta rule. Rows of bfloat16, of which a register holds two, are of one kind of token."""
    x = make_product_inputs(1, 20, 1, 1, 8, 8, n=1, dtype=jnp.bfloat16)
    o = chunk_gated_delta_product(**x, num_householder=1, implementation="fused")[0]
    np.testing.assert_array_equal(o, chunk_gated_delta_rule(**x, implementation="fused")[0])


@implementations
def test_four_steps(implementation):
    assert_steps(kind(4), implementation)


def test_raw_gates_of_a_step():
    """Only the boundaries of sequences that exist say where padding begins."""
    step = lambda S, token, scale: definitions.gated_delta_product(
        S, token | dict(g=-jax.nn.softplus(token["g"])), scale
    )
    raw = kind(2, use_gate_in_kernel=True, A_log=jnp.zeros(2))
    assert_steps(raw._replace(definition=definitions.TokenRule(step)), "xla")


@pytest.mark.parametrize("form", FORMS)
def test_raw_gates(form):
    """Raw gates and step sizes are the decays and step sizes that the laws make; padding gives no gradient."""
    (fixed, states), n = FORMS[form], 2
    x = make_product_inputs(1, 44, 1, 2, 8, 8, n=n, num_states=states, normalise=True)
    raw = dict(A_log=jnp.array([0.5, -1.0]), dt_bias=jnp.array([-1.0, 0.5]))
    call = functools.partial(chunk_gated_delta_product, num_householder=n, chunk_size=16, **fixed)

    def inside(x, raw):
        flags = dict(use_gate_in_kernel=True, use_beta_sigmoid_in_kernel=True, allow_neg_eigval=True)
        return call(**x, **raw, **flags)[0]

    def outside(x, raw):
        g = -jnp.exp(raw["A_log"]) * jax.nn.softplus(x["g"] + raw["dt_bias"])
        return call(**x | dict(g=g, beta=2 * jax.nn.sigmoid(x["beta"])))[0]

    loss = lambda run: jax.jit(jax.grad(lambda x, raw: jnp.sum(jnp.sin(run(x, raw))), argnums=(0, 1)))
    found, want = loss(inside)(poison_padding(x, **fixed), raw), loss(outside)(x, raw)
    jax.tree.map(lambda y, z: assert_close("gradient", y, z, 1e-5), found, want)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (dict(cu_seqlens=np.array([0, 3, 4]), num_decodes=2, state_indices=np.arange(4).reshape(2, 2)),
         "`num_decodes` must count sequences of at most 2 tokens, which come first; got 2, and sequence 0 has 3."),
        (dict(states=state_pool.make_pool(6, 2, 8, 8, replay=3, H=1), num_decodes=1, decode_tokens=2),
         "`decode_tokens` must be at most 1, because every token takes 2 of the 3 tokens of the ring; got 2."),
        (dict(block_size=24, block_state_indices=np.array([[2], [3]]), chunk_size=16),
         "`block_size` must be a multiple of the chunk size 16; got 24."),
    ],
)  # fmt: skip
def test_errors_of_steps(wrong, message):
    step = dict(states=jnp.zeros((6, 2, 8, 8)), cu_seqlens=np.array([0, 2, 4]), state_indices=np.arange(2)) | wrong
    with pytest.raises(ValueError, match=re.escape(message)):
        ragged_gated_delta_product(**make_product_inputs(1, 4, 1, 2, 8, 8), num_householder=2, **step)
