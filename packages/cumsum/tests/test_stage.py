"""The tests that all stages have, in both directions, and gates per channel."""

import dataclasses

import jax.numpy as jnp
import pytest

from chunkwise.cumsum import Config, chunk_local_cumsum
from chunkwise.shared.testing import stage_oracle
from chunkwise.shared.testing.compare import STAGE_TOLERANCE
from chunkwise.shared.testing.inputs import spec
from tests import stage_suite as stages
from tests.stage_cases import CASES

LAUNCHES = "chunk_local_cumsum_fwd_c{}", "chunk_local_cumsum_fwd_c{}_reverse"
FORWARD = stages.StageSpec(
    function=chunk_local_cumsum,
    arguments=("g",),
    results=("g_cum",),
    definition=stage_oracle.cumsum,
    costs=(stages.CostSpec(dict(K=1), dict(K=1)), stages.CostSpec()),
    inputs=lambda case: dict(g=case.arguments()["g"].astype(case.dtype)),
    split=("cu_seqlens",),
    configs=(Config(1, 8), Config(3, 8)),
    launches=LAUNCHES,
    tpu_sizes=((64, 128, False), (64, 128, True), (128, 128, False), (128, 128, True)),
    wrong=(
        (dict(g=spec(2, 64)), "`g` must have shape [B, T, H] or [B, T, H, K]; got (2, 64)."),
        (dict(g=spec(2, 64, 2, dtype=jnp.int32)), "`g` must be float32, bfloat16 or float16; got int32."),
        (dict(reverse="no"), "`reverse` must be True or False, known when the program is built; got 'no'."),
    ),
)
REVERSE = dataclasses.replace(FORWARD, options=dict(reverse=True), launches=LAUNCHES[::-1])
# Three channels of each head, of different gates.
CHANNELS = dict(inputs=lambda case: dict(g=-(case.arguments()["k"] ** 2) + case.arguments()["g"][..., None]))


class TestForward(stages.StageTests, stages.ChunkSizeTests):
    stage = FORWARD

    def test_second_derivative(self):
        """Its gradient is the stage in the other direction, which has a gradient too."""
        for implementation in ("xla", "pallas"):
            stages.trace_second_derivative(self.stage, implementation)


class TestReverse(stages.ReferenceTests, stages.IsolationTests, stages.KernelTests):
    stage = REVERSE


@stages.both
@pytest.mark.parametrize("stage", [FORWARD, REVERSE], ids=["forward", "reverse"])
@pytest.mark.parametrize("lengths", [None, (1, 0, 17)], ids=["fixed", "packed"])
def test_gradients_of_gates_per_channel(lengths, stage, implementation):
    stages.assert_gradients(dataclasses.replace(stage, **CHANNELS), stages.small(lengths=lengths), implementation)


@pytest.mark.parametrize("implementation", ["xla", "pallas"])
@pytest.mark.parametrize("channels", [1, 3, 60, 64, 100, 128, 256])
def test_gate_per_channel(channels, implementation):
    g = -jnp.arange(1.0, 41 * 2 * channels + 1).reshape(1, 41, 2, channels) % 7 / 3
    G = chunk_local_cumsum(g, 32, implementation=implementation)
    CASES[0].assert_close("G", G, stage_oracle.cumsum(g, 32), STAGE_TOLERANCE)
