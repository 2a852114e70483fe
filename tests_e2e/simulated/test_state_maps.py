"""The kernels for tokens that are split over devices: the map of the states, and the gradient of the states alone."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from chunkwise import fused_gdn, fused_gla, kda, two_keys
from chunkwise.fused_gdn import operator as gdn_operator
from chunkwise.fused_gla import operator as gla_operator
from chunkwise.kda import operator as kda_operator
from chunkwise.pipeline import operators
from chunkwise.shared.call import arguments
from chunkwise.shared.implementation import implementations
from chunkwise.shared.testing import compare, inputs, oracle
from chunkwise.two_keys import operator as two_keys_operator
from tests import segment_suite

THOROUGH = dict(test_state_map=lambda operator, batch: batch != "rows" or operator != "gla")
OPERATORS = {
    "gated_delta_rule": (gdn_operator.OPERATOR, fused_gdn.Config(1, 1, chunks=2)),
    "gated_delta_rule in turns": (gdn_operator.OPERATOR, fused_gdn.Config(1, 1, turns=2)),
    "kda": (kda_operator.OPERATOR, kda.Config(1, 1, chunks=2)),
    # Two heads share the lanes, and the map takes two chunks a grid step.
    "kda in twos": (kda_operator.OPERATOR, kda.Config(2, 2)),
    "gdn2 in twos": (two_keys_operator.GDN2, two_keys.Config(2, 2)),
    "comba in twos": (two_keys_operator.COMBA, two_keys.Config(2, 2)),
    "gdn2": (two_keys_operator.GDN2, two_keys.Config(1, 1)),
    "comba": (two_keys_operator.COMBA, two_keys.Config(1, 1)),
    "gla": (gla_operator.GLA, fused_gla.Config(1, 1, 2)),
    "simple_gla": (gla_operator.SIMPLE_GLA, fused_gla.Config(1, 1, 2)),
}
# A block of one head is whole registers.
K = 128
BATCHES = {
    "rows": ({}, (2, 50), 128),
    # Two chunks a grid step, of which the last step has one.
    "chunks": ({}, (1, 137), 128),
    "pack": (dict(cu_seqlens=inputs.boundaries(1, 17, 0, 20)), (1, 40), 128),
    "segments": (dict(segment_ids=jnp.asarray(segment_suite.SEGMENT_IDS)), segment_suite.SEGMENT_IDS.shape, 128),
    "eight chunks": ({}, (2, 128), 128),
    "eight large chunks": ({}, (1, 512), 120),
    # The identity does not fit beside the states, and takes a launch of its own.
    "wide": ({}, (1, 20), 250),
}


CASES = [("rows", 1), ("chunks", 1), ("pack", 2), ("segments", 1), ("wide", 1)]
CASES = [(operator, *case) for operator in OPERATORS if " in " not in operator for case in CASES]
CASES += [("gated_delta_rule in turns", "eight chunks", 1)]
CASES += [(operator, "eight large chunks", 1) for operator in OPERATORS if operator.endswith("twos")]


@pytest.mark.parametrize(("operator", "batch", "cores"), CASES)
def test_state_map(operator, batch, cores):
    """The map takes any state to the state after the tokens, and the operator takes the arrays that it precomputed."""
    (record, config), (sequences, sizes, V) = OPERATORS[operator], BATCHES[batch]
    fused, entry = record.implementations["fused"], operators.OPERATORS[f"chunk_{operator.partition(' ')[0]}"]
    count = len(sequences["cu_seqlens"]) - 1 if "cu_seqlens" in sequences else sizes[0]
    dtype, chunk_size = ("bfloat16", 64) if batch == "eight large chunks" else ("float32", 16)
    x = inputs.make_inputs(
        *sizes, 1, 2, K, V, per_channel=entry.per_channel, erase=entry.erase, num_states=count, dtype=jnp.dtype(dtype)
    )
    x |= {} if entry.delta else dict(beta=None)
    start = x["initial_state"]
    options = arguments.Options(
        True, chunk_size=chunk_size, config=config, erase_before_decay=record.erase_before_decay
    )
    given = lambda x, start: arguments.Arguments(**x | dict(initial_state=start), **sequences)
    rng = np.random.default_rng(1)
    do, dht = (jnp.asarray(rng.standard_normal(x[name].shape), x[name].dtype) for name in ("v", "initial_state"))

    @jax.jit
    def programs(x, start, do, dht):
        y = given(x, start)
        plan, of_states = (implementations.plan(fused, y, options, states) for states in (False, True))
        found, precomputed = implementations.map_states(of_states, given(x, jnp.zeros_like(start)))
        o, final_state = implementations.run(plan, y, precomputed)
        dh0 = implementations.state_gradient(of_states, y, precomputed, do, dht)
        return found.N, found.M, o, final_state, dh0

    finite = {name: y for name, y in x.items() if y is not None}
    poisoned = inputs.poison_padding(finite, **sequences)
    states, M, o, final_state, dh0 = programs(x | poisoned, start, do, dht)
    want_o, want, gradients = oracle.reference(**finite, **sequences, do=do, dht=dht)
    compare.assert_close("o", o, want_o, compare.TOLERANCE[dtype])
    compare.assert_close("final_state", final_state, want, compare.TOLERANCE[dtype])
    compare.assert_close("dh0", dh0, gradients["initial_state"], compare.GRADIENT_TOLERANCE[dtype])
    if M is not None:  # else it is the sum of the gates
        # No kernel makes the map of an empty sequence.
        some = np.diff(sequences["cu_seqlens"]) > 0 if "cu_seqlens" in sequences else np.full(count, True)
        mapped = M * start if M.shape[3] == 1 else jnp.matmul(M, start, precision="highest")
        compare.assert_close("mapped", (states + mapped)[some], want[some], compare.TOLERANCE[dtype])
