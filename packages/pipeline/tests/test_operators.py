"""Every operator under every implementation: outputs, states and gradients against the float64 recurrence."""

import functools

import jax.numpy as jnp
import numpy as np
import pytest

from chunkwise.pipeline.operators import CHUNKED
from chunkwise.shared.testing.compare import TOLERANCE, assert_close, error
from chunkwise.shared.testing.inputs import boundaries
from chunkwise.shared.testing.oracle import reference
from tests.recurrence import assert_recurrence

PACKED = boundaries(1, 29, 0, 35)  # 1 token, an empty sequence, tails, 5 tokens of padding
THOROUGH = dict(
    # A pack goes through the kernels of a batch and more tables, so one chain of the three is enough. The packages have
    # the other implementations, and the tests of transforms and of gates the delta rules.
    test_outputs_and_gradients=lambda operator, implementation, packed: (
        not packed or implementation != "staged" or operator.name != "chunk_gla"
    ),
    test_chunks_of_none=lambda operator: operator.per_channel or operator.delta,
    test_what_the_docstring_says_of_the_stages=True,
)
named = functools.partial(pytest.mark.parametrize, "operator", ids=lambda operator: operator.name)


@pytest.mark.parametrize(
    ("operator", "implementation", "packed"),
    [
        *(pytest.param(x, i, True, id=f"{x.name}-{i}-packed") for x in CHUNKED for i in x.implementations),
        # Without packing all but these staged chains is tested elsewhere: by a package, or for the gated delta rule.
        *(pytest.param(x, "staged", False, id=f"{x.name}-staged") for x in CHUNKED if "gated" not in x.name),
    ],
)
def test_outputs_and_gradients(operator, implementation, packed):
    """One program for gates of ordinary strength and for gates that forget everything."""
    options = dict(cu_seqlens=PACKED if packed else None, chunk_size=32, implementation=implementation)
    options |= dict(use_qk_l2norm_in_kernel=True) if operator.delta else {}
    states = 4 if packed else 1
    for gate in ("logsigmoid", "resets"):
        inputs = operator.source.inputs(1, 70, 2, 4, 16, 24, num_states=states, gate=gate, normalise=False)
        assert_recurrence(operator.function, inputs, **options)


@named(CHUNKED)
def test_chunks_of_none(operator):
    """None is a chunk size like any other: results agree up to rounding, also for fewer tokens than a chunk."""
    for T in (5, 70):
        inputs = operator.source.inputs(1, T, 2, 2, 16, 24)
        o, _ = operator.function(**inputs, chunk_size=None, implementation="xla")
        assert_close("o", o, operator.function(**inputs, chunk_size=64, implementation="xla")[0], TOLERANCE["float32"])


@named(CHUNKED)
def test_what_the_docstring_says_of_the_stages(operator):
    """Weak and strong gates in one chunk, over five decades: "staged" loses digits, up to the docstring's number."""
    inputs = operator.source.inputs(1, 256, 1, 1, 32, 32)
    decades = 10.0 ** np.random.default_rng(2).uniform(-4, 1, inputs["g"].shape)
    inputs["g"] = jnp.asarray(-decades, jnp.float32)
    expected = reference(**inputs)[0]
    run = lambda name: operator.function(**inputs, chunk_size=128, implementation=name)[0]
    errors = {name: error(run(name), expected) for name in ("xla", "staged")}
    assert "can reach 5e-5" in " ".join(operator.function.__doc__.split())
    assert errors["staged"] < 5e-5
    assert errors["xla"] < 1e-6
