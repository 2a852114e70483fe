"""The operands and the static description of GLA's kernels, with fields that other operators do not have."""

import dataclasses

import jax

from chunkwise.shared.kernels.spans import operands


@dataclasses.dataclass(frozen=True)
class GlaOperands(operands.Operands):
    """The arrays that a launch reads; None for an array that it does not have.

    Attributes:
      g_gamma: constant gates [HV, 1, 1] float32.
    """

    g_gamma: jax.Array | None = None


jax.tree_util.register_dataclass(GlaOperands)


@dataclasses.dataclass(frozen=True)
class GlaStatic(operands.FusedStatic):
    """The static description of a launch.

    Attributes:
      constant: every chunk has the same decays: constant gates, whole chunks, one sequence.
      parts: how many bfloat16 parts computed tiles have in products: two where the gradient of constant gates is
        requested, and where the terms of outputs cancel.
      read_parts: how many of them the scores and the state have where an output is read.
    """

    constant: bool = False
    parts: int = 1
    read_parts: int = 1
