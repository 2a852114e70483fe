"""Erase keys that read the state before the decay of their token, gates per head and per channel, against float64.

A gate that forgets everything does not forget for such a key, which still reads: so a boundary is no gate.
"""

import functools

import jax.numpy as jnp
import numpy as np
import pytest

from chunkwise.pipeline import chunk_comba, recurrent_comba, staged
from chunkwise.shared.call import checks
from chunkwise.shared.call.arguments import Arguments, Options, Slots
from chunkwise.shared.testing import oracle
from chunkwise.shared.testing.compare import assert_close
from chunkwise.shared.testing.inputs import make_inputs
from chunkwise.two_keys import operator
from tests.composition_suite import FORMS, T
from tests.recurrence import assert_recurrence

CASES = [
    *((how, "chunk", form) for how in ("xla", "fused", "staged") for form in FORMS),
    *((how, "recurrent", form) for how in ("xla", "fused") for form in ("rows", "sequences")),
]
# Plain JAX takes segments by gates and erase keys of zeros; Comba has the cases of gates per head.
QUICK = ("xla", "segments"), ("staged", "sequences")
THOROUGH = dict(
    test_values_and_gradients=lambda implementation, call, form, per_channel, gate, dtype: (
        (implementation, form) not in QUICK
        or (call, per_channel, gate, dtype) != ("chunk", True, "resets", jnp.float32)
    ),
    test_comba_of_flash_linear_attention=True,
)


def check(x: Arguments, options: Options) -> None:
    """Take gates per head or per channel."""
    checks.check_delta_rule(x.q, x.k, x.v, x.g, x.beta, x.cu_seqlens, per_channel=x.g.ndim == 4)


RECORD = operator.define_rule("before_decay", check, erase_before_decay=True)


@functools.cache
def function_of(call: str):
    """Return a call of the record as a function of inputs by name."""

    def run(cu_seqlens=None, segment_ids=None, implementation=None, output_final_state=False, **x):
        x = Arguments(
            **x, cu_seqlens=cu_seqlens, segment_ids=segment_ids, slots=Slots() if call == "recurrent" else None
        )
        options = Options(output_final_state=output_final_state, use_qk_l2norm_in_kernel=True, chunk_size=16)
        return getattr(RECORD, call)(x, options, implementation)

    return run


@pytest.fixture(scope="module", autouse=True)
def _staged():
    staged.add_delta_rule(RECORD)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("gate", ["logsigmoid", "strong", "resets"])
@pytest.mark.parametrize("per_channel", [False, True])
@pytest.mark.parametrize(("implementation", "call", "form"), CASES)
def test_values_and_gradients(implementation, call, form, per_channel, gate, dtype):
    """Padding is NaN."""
    fixed, states = FORMS[form]
    x = make_inputs(
        1, T, 1, 2, 24, 16, dtype=dtype, per_channel=per_channel, num_states=states, gate=gate, erase="key",
        normalise=False,
    )  # fmt: skip
    reference = functools.partial(oracle.reference, use_qk_l2norm_in_kernel=True)
    assert_recurrence(function_of(call), x, **fixed, implementation=implementation, expected=reference)


def test_comba_of_flash_linear_attention():
    """The recurrence of its kernels, restated in float64: the erased value is read before the decay and before beta."""
    x = make_inputs(1, 40, 1, 2, 8, 12, erase="key", gate="resets", num_states=1)
    q, k, p, v, g, beta, S = (
        np.asarray(x[name][0], np.float64) for name in ("q", "k", "p", "v", "g", "beta", "initial_state")
    )
    want = np.empty(v.shape)
    for t in range(len(q)):
        written = beta[t][:, None] * (v[t] - np.einsum("hkv,k->hv", S, p[t, 0]))
        S = np.exp(g[t])[:, None, None] * S + k[t, 0][None, :, None] * written[:, None]
        want[t] = 8**-0.5 * np.einsum("hkv,k->hv", S, q[t, 0])
    for function in (chunk_comba, recurrent_comba):
        o, state = function(**x, output_final_state=True)
        assert_close("o", o[0], want, 1e-5)
        assert_close("final_state", state[0], S, 1e-5)
