"""The operands and the static description of KDA's kernels, with fields that other operators do not have."""

import dataclasses

import jax

from chunkwise.shared.kernels import gate_activation
from chunkwise.shared.kernels.spans import operands


@dataclasses.dataclass(frozen=True)
class KdaOperands(operands.Operands):
    """The arrays that a launch reads; None for an array that it does not have.

    Attributes:
      e: erase keys, laid out as k; None where k erases, or k and b.
      b: erase gates [B, T, HV * K], which multiply erase keys.
      w: write gates [B, T, HV * V], which multiply values.
      law: A_log and dt_bias of every gate, float32.
      scores: of all spans, the scores of queries, and below them the scores of keys, float32, p heads side by side.
    """

    e: jax.Array | None = None
    b: jax.Array | None = None
    w: jax.Array | None = None
    law: jax.Array | None = None
    scores: jax.Array = operands.ABSENT


jax.tree_util.register_dataclass(KdaOperands)


@dataclasses.dataclass(frozen=True)
class KdaStatic(operands.FusedStatic):
    """The static description of a launch.

    Attributes:
      gate_law: the law of raw gates, or None.
      base: rows of the diagonal blocks that one product covers.
      bounded: whether a promise keeps gates weak enough for base blocks in all rows.
      erase_before_decay: whether erase keys read the state before the decay of their token.
    """

    gate_law: gate_activation.Law | None = None
    base: int = 1
    bounded: bool = False
    erase_before_decay: bool = False

    @property
    def may_forget(self) -> bool:
        """Whether there may be rows that base blocks cannot have."""
        return self.base > 1 and not self.bounded
