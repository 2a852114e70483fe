"""Erase keys that read the state before the decay of their token, gates per head and per channel, against float64.

A gate that forgets everything does not forget for such a key, which still reads: so a boundary is no gate.
"""

import functools

from chunkwise.shared.call import checks
from chunkwise.shared.call.arguments import Arguments, Options, Slots
from chunkwise.shared.testing import oracle
from chunkwise.shared.testing.inputs import make_inputs
from chunkwise.two_keys import operator
from tests.composition_suite import FORMS, T
from tests.recurrence import assert_recurrence

GATES = ("logsigmoid", "strong", "resets")


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


def assert_values_and_gradients(implementation, call, form, per_channel, gate, dtype):
    """Compare with the recurrence; padding is NaN."""
    fixed, states = FORMS[form]
    x = make_inputs(
        1, T, 1, 2, 24, 16, dtype=dtype, per_channel=per_channel, num_states=states, gate=gate, erase="key",
        normalise=False,
    )  # fmt: skip
    reference = functools.partial(oracle.reference, use_qk_l2norm_in_kernel=True)
    assert_recurrence(function_of(call), x, **fixed, implementation=implementation, expected=reference)
