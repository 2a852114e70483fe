"""What is not finite in one sequence changes no bit of the others."""

import jax.numpy as jnp
import pytest

from chunkwise.mlstm import MlstmState, chunk_mlstm, recurrent_mlstm
from chunkwise.shared.testing.inputs import make_inputs
from tests.poison import assert_operator_isolated

# Chunks of 16: two hold several sequences, one lies inside a sequence, and the last is padding.
LENGTHS = (3, 0, 40, 5)
THOROUGH = dict(test_sequences_of_a_pack=lambda of, implementation: "states" in of and implementation == "fused")


def in_one_array(fn):
    """Return a function whose initial and final states are one array: C, n and the stabiliser in its first row."""

    def run(initial_state=None, chunk_size=None, **x):
        options = {} if fn is recurrent_mlstm else dict(chunk_size=chunk_size)
        if (S := initial_state) is not None:
            options["initial_state"] = MlstmState(S[..., :3], S[..., 3], jnp.sum(S[..., 4], axis=-1))
        o, state = fn(**x, **options)
        return o, None if state is None else jnp.concatenate([state.C, state.n[..., None]], 3)

    return run


@pytest.mark.parametrize("implementation", ["xla", "fused"])
@pytest.mark.parametrize("of", ["sequences", "sequences with states", "recurrent sequences with states"])
def test_sequences_of_a_pack(of, implementation):
    def make(B, T, num_states):
        x = make_inputs(B, T, 2, K=4, V=5, num_states=num_states)
        x["v"], x["i"], x["f"] = x["v"][..., :3], x.pop("beta"), 3 * x.pop("g")
        return x

    fn = in_one_array(recurrent_mlstm if "recurrent" in of else chunk_mlstm)
    assert_operator_isolated(fn, make, of, LENGTHS, implementation=implementation)
