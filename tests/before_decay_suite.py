"""Erase keys that read the state before the decay of their token, gates per head and per channel, against float64.

A gate that forgets everything does not forget for such a key, which still reads: so a boundary is no gate.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from chunkwise.shared.call import checks
from chunkwise.shared.call.arguments import Arguments, Options, Slots
from chunkwise.shared.testing.compare import GATE_GRADIENT_TOLERANCE, GRADIENT_TOLERANCE, TOLERANCE, assert_close
from chunkwise.shared.testing.inputs import boundaries, make_inputs, poison_padding
from chunkwise.shared.testing.oracle import reference
from chunkwise.two_keys import operator

PACKED = boundaries(1, 17, 0, 16, 20)  # sequences that begin inside of a chunk, and between chunks
T = 60  # six tokens of padding
IDS = jnp.asarray(np.repeat([[3, 5, -1, 6]], [1, 17, 4, T - 22], axis=1), jnp.int32)
# Options of a call, and how many states it has.
FORMS = {
    "rows": ({}, 1),
    "stream": (dict(cu_seqlens=PACKED), 0),
    "sequences": (dict(cu_seqlens=PACKED), 5),
    "segments": (dict(segment_ids=IDS), 1),
}
GATES = ("logsigmoid", "strong", "resets")


def check(x: Arguments, options: Options) -> None:
    """Take gates per head or per channel."""
    checks.check_delta_rule(x.q, x.k, x.v, x.g, x.beta, x.cu_seqlens, per_channel=x.g.ndim == 4)


RECORD = operator.define_rule("before_decay", check, erase_before_decay=True)


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def values_and_gradients(call, implementation, options, x, fixed, do, dht):
    """Return the outputs of a call of the record, and the gradients of all floating inputs."""

    def run(x):
        x = Arguments(**x, **fixed, slots=Slots() if call == "recurrent" else None)
        return getattr(RECORD, call)(x, options, implementation)

    found, pull = jax.vjp(run, x)
    return found, pull((do, dht))[0]


def assert_values_and_gradients(implementation, call, form, per_channel, gate, dtype):
    """Compare with the recurrence; padding is NaN."""
    fixed, states = FORMS[form]
    x = make_inputs(
        1, T, 1, 2, 24, 16, dtype=dtype, per_channel=per_channel, num_states=states, gate=gate, erase="key",
        normalise=False,
    )  # fmt: skip
    rng = np.random.default_rng(0)
    do = jnp.asarray(rng.standard_normal(x["v"].shape), dtype)
    dht = jnp.asarray(rng.standard_normal((states, 2, 24, 16)), jnp.float32) if states else None
    options = Options(output_final_state=bool(states), use_qk_l2norm_in_kernel=True, chunk_size=16)
    spoilt = poison_padding(x, fixed.get("cu_seqlens"), fixed.get("segment_ids"))
    found, grads = values_and_gradients(call, implementation, options, spoilt, fixed, do, dht)
    *expected, gradients = reference(**x, **fixed, use_qk_l2norm_in_kernel=True, do=do, dht=dht)
    kind = jnp.dtype(dtype).name
    for name, y, want in zip(("o", "final_state")[: 1 + bool(states)], found, expected, strict=False):
        assert_close(name, y, want, TOLERANCE[kind])
    for name, y in grads.items():
        limit = (GATE_GRADIENT_TOLERANCE if name in ("g", "beta") else GRADIENT_TOLERANCE)[kind]
        assert_close(f"d{name}", y, gradients[name], limit)
