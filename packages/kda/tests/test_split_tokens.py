"""The launches over tokens that are split over devices: together they are the operator, and make nothing twice."""

import pytest

from chunkwise.kda.operator import OPERATOR
from chunkwise.shared.call.gates import GateActivation
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
