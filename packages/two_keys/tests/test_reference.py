"""GDN-2 and Comba against the float64 recurrence, with the same rounded inputs, and with raw gates."""

import jax.numpy as jnp
import pytest

from chunkwise.shared.testing.inputs import boundaries
from tests.either_two_keys import KINDS
from tests.laws import raw_inputs
from tests.recurrence import assert_recurrence

kinds = pytest.mark.parametrize("kind", KINDS)
both = pytest.mark.parametrize("implementation", ["xla", "fused"])
types = pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
PACKED = boundaries(1, 0, 17, 16, 0, 20, 3)  # empty sequences, tails, several sequences in a chunk
T_PACKED = 62  # 5 tokens of padding
SIZES = (2, 41, 1, 2, 16, 24)

# The kernels and the plain form are those of KDA, whose package has all cases of gates and sizes.
THOROUGH = dict(
    test_gradients=lambda kind, implementation, dtype, case: (
        (kind, implementation, dtype, case) != ("gdn2", "fused", jnp.float32, "repeated keys")
    ),
    test_erase_gates_of_0_and_2=True,
    # The laws are those of kda, whose tests have them.
    test_raw_gates=True,
    test_packed=lambda kind, implementation, states: (kind, implementation, states) != ("comba", "fused", True),
    test_decode=lambda kind, implementation, dtype: (kind, implementation, dtype) != ("gdn2", "fused", jnp.float32),
)


# Erase gates of 2 and of 0, keys that repeat, gates of every strength.
CASES = {
    "repeated keys": dict(beta=2.0, repeat_key=True),
    "strong": dict(gate="strong"),
    "spikes": dict(gate="spikes"),
    "no gate": dict(gate="zero"),
    "nothing erased": dict(beta=0.0),
    "nothing erased under repeated keys": dict(beta=0.0, repeat_key=True),
}
# Comba reads before the decay: beside a decay, a key that repeats with a step size of 2 makes the state grow.
COMBA = CASES | {"repeated keys": dict(gate="zero", beta=1.9, repeat_key=True)}


@types
@pytest.mark.parametrize("case", CASES)
@both
@kinds
def test_gradients(kind, implementation, case, dtype):
    options = (COMBA if kind == "comba" else CASES)[case]
    x = KINDS[kind].inputs(*SIZES, dtype=dtype, num_states=2, **options)
    assert_recurrence(KINDS[kind].chunk, x, implementation=implementation, chunk_size=16)


@both
@kinds
def test_erase_gates_of_0_and_2(kind, implementation):
    """Keys repeat; every token erases twice in half of the channels and never in the others, or with a key of 0."""
    x = KINDS[kind].inputs(*SIZES, num_states=2, repeat_key=True, beta=2.0)
    name = "b" if kind == "gdn2" else "p"
    odd = (jnp.arange(SIZES[1])[:, None, None] + jnp.arange(SIZES[4] if kind == "gdn2" else 1)) % 2
    x[name] = x[name] * odd.astype(x[name].dtype)
    assert_recurrence(KINDS[kind].chunk, x, implementation=implementation, chunk_size=16)


@pytest.mark.parametrize("states", [True, False])
@both
@kinds
def test_packed(kind, implementation, states):
    """Queries and keys are scaled to unit length, and so are the erase keys of Comba."""
    x = KINDS[kind].inputs(1, T_PACKED, 2, 2, 16, 24, num_states=7 if states else 0, normalise=False)
    options = dict(implementation=implementation, chunk_size=16, use_qk_l2norm_in_kernel=True)
    assert_recurrence(KINDS[kind].chunk, x, cu_seqlens=PACKED, **options)


@types
@both
@kinds
def test_decode(kind, implementation, dtype):
    x = KINDS[kind].inputs(3, 3, 1, 2, 130, 7, dtype=dtype, num_states=3, normalise=False)
    assert_recurrence(KINDS[kind].recurrent, x, implementation=implementation, use_qk_l2norm_in_kernel=True)


SIGMOIDS = {"gdn2": ("erase", "write"), "comba": ("beta",)}


@pytest.mark.parametrize("form", ["chunk", "recurrent"])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("implementation", ["xla", "fused"])
@pytest.mark.parametrize("kind", KINDS)
def test_raw_gates(kind, implementation, dtype, form):
    """Erase gates and step sizes are doubled."""
    x = raw_inputs(KINDS[kind].inputs(1, 24, 1, 2, 8, 8, dtype=dtype, num_states=4), dtype=dtype)
    raw = dict.fromkeys((f"use_{name}_sigmoid_in_kernel" for name in SIGMOIDS[kind]), True)
    assert_recurrence(
        getattr(KINDS[kind], form), x, **raw, **dict(chunk_size=16) if form == "chunk" else {},
        use_gate_in_kernel=True, allow_neg_eigval=True, cu_seqlens=boundaries(1, 17, 0, 3),
        implementation=implementation,
    )  # fmt: skip
