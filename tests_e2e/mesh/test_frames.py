"""How many of our functions stand between a call of the user and a launch, where tokens are split over devices."""

import jax

from chunkwise.pipeline import chunk_gated_delta_rule
from chunkwise.shared.testing.inputs import make_inputs
from tests.traced import assert_frames
from tests_e2e.mesh.meshes import P, make_mesh


def test_tokens():
    x = make_inputs(1, 64, 1, 2, 16, 16)
    run = lambda: chunk_gated_delta_rule(**x, implementation="fused", sharding=P(None, "a"))
    with jax.set_mesh(make_mesh((4,), "automatic")):
        assert_frames(run, most=15)
