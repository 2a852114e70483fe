"""The operations of JAX in the body of every kernel, which the TPU compiler's time grows with: by tracing alone."""

import pytest

from chunkwise.command.models import Layer, program
from tests import traced

# At most so many, some per cent above what both ends of the supported releases of JAX trace. An engine compiles some
# twenty numbers of tokens, so whoever raises a number here makes it start later.
OPERATIONS = {
    "chunk_gated_delta_rule": {"fwd": 5_800, "states": 1_800, "bwd": 3_600},
    "chunk_simple_gla": {"fwd": 420, "bwd": 2_650},
    "chunk_gla": {"fwd": 640, "bwd": 1_350},
    "chunk_kda": {"fwd": 14_500, "bwd": 10_300},
    "chunk_gdn2": {"fwd": 14_600, "bwd": 22_900},
}
HEADS = {"chunk_gated_delta_rule": (16, 32), "chunk_simple_gla": (64, 64), "chunk_gla": (16, 16)}
THOROUGH = dict(test_operations=lambda name: name in ("chunk_kda", "chunk_gdn2", "chunk_gated_delta_rule"))


@pytest.mark.parametrize("name", OPERATIONS)
def test_operations(name):
    H, HV = HEADS.get(name, (32, 32))
    fn, specs = program(Layer(name.removeprefix("chunk_"), H, HV), "fused", 256, True, None)
    found = {launch.name.split("_")[-2]: launch.operations for launch in traced.launches(fn, *specs)}
    assert found.keys() == OPERATIONS[name].keys()
    for kind, most in OPERATIONS[name].items():
        assert 0.8 * most < found[kind] <= most, f"the kernel {kind} of {name} has {found[kind]} operations"
