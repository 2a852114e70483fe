"""The tests of all stages that fit the convolution, and one compilation for all ids of segments."""

from typing import ClassVar

import jax.numpy as jnp
import numpy as np

from chunkwise.causal_conv1d import causal_conv1d
from tests import stage_suite as stages
from tests import transforms

RNG = np.random.default_rng(0)
WEIGHT = jnp.asarray(RNG.standard_normal((5, 4)), jnp.float32)


def tokens(case):
    N = case.B if case.lengths is None else len(case.lengths)
    shapes = dict(x=(case.B, case.T, 5), initial_state=(N, 3, 5))
    return {name: jnp.asarray(np.random.default_rng(1).standard_normal(y), jnp.float32) for name, y in shapes.items()}


class TestConvolution(stages.TransformTests, stages.PackTests, stages.ErrorTests):
    # Nothing else runs its kernel in these modes.
    THOROUGH: ClassVar = dict(
        test_64_bits_and_strict_promotion=lambda implementation: implementation == "xla",
        test_boundaries_are_traced=lambda implementation: implementation == "xla",
    )
    stage = stages.StageSpec(
        function=causal_conv1d,
        arguments=("x", "initial_state"),
        results=("y", "final_state"),
        inputs=tokens,
        shared=dict(weight=WEIGHT),
        options=dict(output_final_state=True, activation="silu"),
        split=("x", "initial_state"),
    )


@stages.both
def test_ids_are_traced(implementation):
    run = lambda x, ids: causal_conv1d(x, WEIGHT, segment_ids=ids, implementation=implementation)[0]
    x = jnp.asarray(RNG.standard_normal((2, 20, 5)), jnp.float32)
    transforms.assert_traced_once(run, *((x, jnp.asarray(RNG.integers(-1, 3, (2, 20)), jnp.int32)) for _ in range(2)))
