"""The launches over tokens that are split over devices: together they are the operator, and make nothing twice."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from chunkwise.kda import Config
from chunkwise.kda.operator import OPERATOR
from chunkwise.shared.call.arguments import Arguments, Options
from chunkwise.shared.call.gates import GateActivation
from chunkwise.shared.testing import compare, inputs, oracle
from tests import split_suite
from tests.laws import raw_inputs

# 16 heads a step, in the order of products that was searched for.
CASES = split_suite.CASES | {
    "measured": ("bfloat16", (1, 130, 16, 16, 8, 8), {}),
    # Two chunks a grid step in the map, with rows after strong gates.
    "eight chunks": ("bfloat16", (1, 512, 2, 16, 72, 60), {}),
}
BOUNDED = GateActivation(True, -5.0)
LAWS = {"rows": BOUNDED, "documents": BOUNDED, "segments": GateActivation(True)}
# Over devices of a mesh the end-to-end tests have quick ones.
THOROUGH = dict(test_together_they_are_the_operator=True)


@pytest.mark.parametrize("case", CASES)
def test_together_they_are_the_operator(case):
    gate = "resets" if case == "eight chunks" else "logsigmoid"
    x, fixed = split_suite.make(CASES[case], per_channel=True, gate=gate)
    if case in LAWS:
        x |= {name: y for name, y in raw_inputs(x, dtype=x["v"].dtype).items() if name != "beta"}
    split_suite.assert_split(OPERATOR.implementations["fused"], x, fixed, LAWS.get(case, GateActivation()))


def test_map_of_two_chunks_a_grid_step():
    """The final state of zeros, and of any state: 8 chunks of a pack of heads, some channels with strong gates."""
    x = inputs.make_inputs(1, 512, 1, 2, 72, 60, dtype=jnp.bfloat16, per_channel=True, gate="zero", num_states=1)
    x["g"] = (x["g"] - 0.004).at[:, 70::97, :, :20].set(-200.0)
    start, options = x["initial_state"], Options(True, chunk_size=64, scale=0.3, config=Config(2, 2))
    x["initial_state"] = jnp.zeros_like(start)
    found = jax.jit(lambda x: OPERATOR.implementations["fused"].state_map(Arguments(**x), options, True)[0])(x)
    want, of_start = (oracle.reference(**x | dict(initial_state=S))[1] for S in (None, start))
    compare.assert_close("N", found.N, want, 4e-3)
    M_S = of_start - want
    assert np.abs(M_S).max() > 1e-2
    compare.assert_close("M S", jnp.matmul(found.M, start, precision="highest"), M_S, 4e-3)
