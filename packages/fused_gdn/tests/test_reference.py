"""The plain JAX form and the exact inverse against float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from chunkwise.fused_gdn import chunk_gated_delta_rule, recurrent_gated_delta_rule
from chunkwise.shared.testing.compare import assert_close, tolerance
from chunkwise.shared.testing.inputs import make_inputs
from chunkwise.shared.testing.oracle import reference
from tests.laws import NO_LAW, strong_raw_inputs
from tests.recurrence import assert_recurrence

THOROUGH = dict(
    test_xla=lambda function, cu_seqlens: function is chunk_gated_delta_rule and cu_seqlens is None,
)


@pytest.mark.parametrize("function", [chunk_gated_delta_rule, recurrent_gated_delta_rule])
@pytest.mark.parametrize("cu_seqlens", [None, [0, 3, 3, 20]])
def test_xla(function, cu_seqlens):
    cu_seqlens = None if cu_seqlens is None else jnp.array(cu_seqlens, jnp.int32)
    x = make_inputs(1, 21, 2, 4, 24, 40, num_states=1 if cu_seqlens is None else 3)
    x["g"] = x["g"].at[:, 7].set(-jnp.inf)
    assert_recurrence(function, x, gradients=False, cu_seqlens=cu_seqlens, implementation="xla")


def test_gradients_of_one_chunk_from_an_empty_state():
    """Interpreted in one program, of which XLA knows that the state is zeros, and that the cotangents are ones."""
    x = make_inputs(1, 20, 1, 1, 8, 8, dtype=jnp.bfloat16, normalise=False)
    options = dict(use_qk_l2norm_in_kernel=True)

    @jax.jit
    @jax.grad
    def gradients(x):
        o, _ = chunk_gated_delta_rule(**x, **options, implementation="fused")
        return jnp.sum(o.astype(jnp.float32))

    expected = reference(**x, **options, do=np.ones(x["v"].shape))[2]
    for name, y in gradients(x).items():
        assert_close(f"d{name}", y, expected[name], tolerance(f"d{name}", "bfloat16"))


def test_gradients_of_strong_raw_gates():
    """The gradient of A_log is a sum of decays times their gradients, which are small where decays are strong."""
    x = strong_raw_inputs(make_inputs(2, 51, 2, 2, 16, 8), 30)
    assert_recurrence(
        chunk_gated_delta_rule, x, but_for=NO_LAW, limit=lambda *_: 3e-6, use_gate_in_kernel=True, chunk_size=16,
        implementation="fused",
    )  # fmt: skip
