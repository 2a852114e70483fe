"""What is not finite in one sequence changes no bit of the others."""

import jax.numpy as jnp
import pytest

from chunkwise.fused_gla import Config, recurrent_gla, recurrent_simple_gla
from chunkwise.shared.testing.inputs import boundaries, make_inputs
from tests.either_gla import chunk_either_gla
from tests.poison import assert_isolated

# Chunks of 16: two hold several sequences, one lies inside a sequence, and the last is padding.
LENGTHS, T = (3, 0, 40, 5), 56
THOROUGH = dict(
    # Quick are gates per channel with states in the kernel.
    test_sequences_of_a_pack=lambda states, per_channel, implementation: (
        not per_channel or not states or implementation != "fused"
    ),
    test_rows_of_a_batch=True,
)


def arguments(B, T, states, per_channel):
    x = make_inputs(B, T, 2, K=4, V=3, num_states=states, per_channel=per_channel)
    del x["beta"]
    return x


def named(fn, **options):
    """Return fn as a function of named arrays and cu_seqlens, with named results."""

    def run(x, cu_seqlens):
        o, state = fn(**x, cu_seqlens=cu_seqlens, **options)
        return {"o": o} if state is None else {"o": o, "final_state": state}

    return run


@pytest.mark.parametrize("implementation", ["xla", "fused"])
@pytest.mark.parametrize("per_channel", [False, True], ids=["head", "channel"])
@pytest.mark.parametrize("states", [False, True], ids=["no states", "states"])
def test_sequences_of_a_pack(states, per_channel, implementation):
    x = arguments(1, T, len(LENGTHS) if states else 0, per_channel)
    options = dict(config=Config(2, 2, 2)) if implementation == "fused" else {}
    run = named(chunk_either_gla, chunk_size=16, output_final_state=states, implementation=implementation, **options)
    assert_isolated(run, x, boundaries(*LENGTHS))


@pytest.mark.parametrize("implementation", ["xla", "fused"])
def test_rows_of_a_batch(implementation):
    x = arguments(2, 20, 2, False) | dict(g_gamma=jnp.asarray([-0.1, -1.0]))
    run = named(chunk_either_gla, chunk_size=16, output_final_state=True, implementation=implementation)
    assert_isolated(run, x, shared=("g_gamma",))


@pytest.mark.parametrize("per_channel", [False, True], ids=["head", "channel"])
def test_recurrences(per_channel):
    fn = recurrent_gla if per_channel else recurrent_simple_gla
    x = arguments(1, 12, 3, per_channel)
    assert_isolated(named(fn, output_final_state=True), x, boundaries(3, 0, 6))
