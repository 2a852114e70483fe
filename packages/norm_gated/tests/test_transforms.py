"""The tests of all stages that fit the norm: rows know nothing of one another, and no definition takes chunks."""

from typing import ClassVar

import jax.numpy as jnp
import numpy as np

from chunkwise.norm_gated import rms_norm_gated
from tests import stage_suite as stages


def rows(case):
    rng = np.random.default_rng(0)
    return {name: jnp.asarray(rng.standard_normal((case.B, 7, 3, 20)), jnp.float32) for name in ("x", "z")}


class TestNorm(stages.TransformTests, stages.ErrorTests):
    # Nothing else runs its kernel in these modes.
    THOROUGH: ClassVar = dict(
        test_64_bits_and_strict_promotion=lambda implementation: implementation == "xla",
    )
    stage = stages.StageSpec(
        function=rms_norm_gated,
        arguments=("x", "z"),
        results=("y",),
        inputs=rows,
        shared=dict(weight=jnp.linspace(0.5, 1.5, 20)),
        split=("x", "z"),
    )
