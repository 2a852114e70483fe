"""The tests of all stages that fit the convolution."""

from typing import ClassVar

import jax.numpy as jnp
import numpy as np

from chunkwise.causal_conv1d import causal_conv1d
from tests import stage_suite as stages

RNG = np.random.default_rng(0)
WEIGHT = jnp.asarray(RNG.standard_normal((5, 4)), jnp.float32)


def tokens(case):
    N = case.B if case.lengths is None else len(case.lengths)
    shapes = dict(x=(case.B, case.T, 5), initial_state=(N, 3, 5))
    return {name: jnp.asarray(np.random.default_rng(1).standard_normal(y), jnp.float32) for name, y in shapes.items()}


class TestConvolution(stages.TransformTests, stages.PackTests, stages.ErrorTests):
    # Nothing else runs its kernel in these modes.
    THOROUGH: ClassVar = dict(test_64_bits_and_strict_promotion=lambda implementation: implementation == "xla")
    stage = stages.StageSpec(
        function=causal_conv1d,
        arguments=("x", "initial_state"),
        results=("y", "final_state"),
        inputs=tokens,
        shared=dict(weight=WEIGHT),
        options=dict(output_final_state=True, activation="silu"),
        split=("x", "initial_state"),
    )
