"""The tests that all stages have."""

from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from chunkwise.shared.testing import compare, stage_oracle
from chunkwise.shared.testing.inputs import spec
from chunkwise.solve_tril import Config, solve_tril
from tests import stage_cases
from tests import stage_suite as stages

STAGE = stages.StageSpec(
    function=solve_tril,
    arguments=("A",),
    results=("A_inv",),
    definition=stage_oracle.inverse,
    split=("cu_seqlens",),
    # The first row of A has nothing below the diagonal, so NaN in it is not read.
    visible=False,
    gradient_sizes=(dict(HV=1), dict(HV=1, lengths=(1, 0, 17))),
    configs=tuple(Config(matrices) for matrices in (1, 2, 3, 6)),
    # A does not depend on K and V.
    tpu_sizes=((64, 128, False), (128, 128, False), (128, 128, True)),
    wrong=(
        (dict(A=spec(2, 64, 64)), "`A` must have shape [B, T, HV, C]; got (2, 64, 64)."),
        (dict(A=spec(2, 64, 1, 48)), "`A` must have a last dimension of one of (16, 32, 64, 128); got 48."),
        (dict(A_inv=spec(2, 64, 2, 64)), "`A_inv` must have shape [B, T, HV, C] = (2, 64, 4, 64); got (2, 64, 2, 64)."),
    ),
)  # fmt: skip


class TestStage(stages.StageTests):
    stage = STAGE
    # To the inverse only the size of a chunk and the packing matter.
    THOROUGH: ClassVar = dict(test_definition=lambda case: case not in stage_cases.CASES[5:6])


def test_second_derivatives_of_a_known_inverse():
    """They are the derivatives of the inverse, not of a constant, also where JAX has traced the gradient already."""
    A = jnp.tril(jnp.asarray(np.random.default_rng(0).standard_normal((16, 16))), -1)[None, :, None] * 0.2

    def hessian_product(A_inv):
        squares = lambda A: jnp.sum(jnp.sin(solve_tril(A, A_inv=A_inv, implementation="xla")))
        return jax.jit(lambda A: jax.jvp(jax.grad(jax.jit(squares)), (A,), (A,))[1])(A)

    compare.assert_close("A", hessian_product(solve_tril(A, implementation="xla")), hessian_product(None), 1e-6)
