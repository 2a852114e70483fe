"""The operands and the static description of GLA's kernels, with fields that other operators do not have."""

import dataclasses
from typing import Any

import jax

from chunkwise.shared.kernels.spans import operands


@dataclasses.dataclass(frozen=True)
class GlaOperands(operands.Operands):
    """The arrays that a launch reads; None for an array that it does not have.

    Attributes:
      g_gamma: constant gates [HV, 1, 1] float32.
      log_weight, least: as in `Arguments`, laid out as gates per head.
    """

    g_gamma: jax.Array | None = None
    log_weight: jax.Array = operands.ABSENT
    least: jax.Array = operands.ABSENT


jax.tree_util.register_dataclass(GlaOperands)


@dataclasses.dataclass(frozen=True)
class GlaStatic(operands.FusedStatic):
    """The static description of a launch.

    Attributes:
      constant: every chunk has the same decays: constant gates, whole chunks, one sequence.
      parts: how many bfloat16 parts computed tiles have in products: two where the gradient of constant gates is
        requested.
      eps: is added to the divisors of outputs; None for outputs that are not divided, see `normaliser`.
    """

    constant: bool = False
    parts: int = 1
    # It is a number wherever it is read, and a type cannot say that.
    eps: Any = None

    @property
    def state(self) -> tuple[int, int]:
        """The shape of the state of a head; sums of keys have a tile of 8 rows behind the rows of values."""
        return self.V + 8 * (self.eps is not None), self.K
