"""What is not finite in one sequence, or in one head, changes no bit of the others."""

import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from chunkwise.mlstm import MlstmState, chunk_mlstm, recurrent_mlstm
from chunkwise.shared.testing.inputs import make_inputs, make_mlstm_inputs
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


@pytest.mark.parametrize("implementation", ["xla", "fused"])
def test_heads(implementation):
    """What is not finite in one head changes no bit of another one, also in the flat layout of the kernels."""
    clean: Any = make_mlstm_inputs(1, 20, 3, K=4, V=5, num_states=1)

    @jax.jit
    def run(x):
        o, pull = jax.vjp(lambda x: chunk_mlstm(**x, chunk_size=16, implementation=implementation)[0], x)
        return dict(o=o, **pull(clean["v"])[0])

    def heads(named):
        move = lambda path, y: np.moveaxis(np.asarray(y), 1 if "initial_state" in str(path) else 2, 0)
        return jax.tree_util.tree_map_with_path(move, named)

    want = heads(run(clean))
    for name, bad in itertools.product(clean, (jnp.nan, jnp.inf)):
        where = (0, 1) if name == "initial_state" else (0, 5, 1)
        put = functools.partial(jax.tree.map, lambda y, where=where, bad=bad: y.at[where].set(bad))
        found = heads(run(clean | {name: put(clean[name])}))
        assert np.isinf(bad) or np.isnan(found["o"][1]).any()
        jax.tree.map(lambda x, y: np.testing.assert_array_equal(x[::2], y[::2]), found, want)
