"""The operands, the static description and the Refs of GLA's kernels."""

import dataclasses
from typing import Any, NamedTuple

import jax

from chunkwise.shared.kernels.spans import operands


@dataclasses.dataclass(frozen=True)
class GlaOperands(operands.Operands):
    """The arrays that a launch reads; None for an array that it does not have.

    Attributes:
      g_gamma: constant gates [HV, 1, 1] float32.
      log_weight, least: as in `Arguments`, laid out as gates per head.
      skip: as in `Arguments`, [1, HV * V] float32.
    """

    g_gamma: jax.Array | None = None
    log_weight: jax.Array = operands.ABSENT
    least: jax.Array = operands.ABSENT
    skip: jax.Array = operands.ABSENT


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


class GlaRefs(NamedTuple):
    """The Refs of the kernels of both directions, and of the launch for the gradient of the initial states alone.

    A Ref that a launch lacks is None. A block has rows = chunks * C tokens and heads value heads; keys are their key
    heads.
    """

    # Of both directions.
    q: jax.Ref  # [rows, keys K]
    k: jax.Ref  # [rows, keys K]
    v: jax.Ref  # [rows, heads V]
    h: jax.Ref  # [heads, V, K]
    table: jax.Ref  # of `chunk_spans`
    g: jax.Ref  # [chunks, heads, 1, C], or per channel [rows, heads K]
    g_gamma: jax.Ref  # [heads, 1, C], beside gates per head or without other gates
    log_weight: jax.Ref  # [chunks, heads, 1, C]
    least: jax.Ref  # [chunks, heads, 1, C]
    skip: jax.Ref  # [1, heads V]
    initial_state: jax.Ref  # [heads, V, K]
    owner: jax.Ref  # int32 [chunks, 1, C]

    # Of the forward, and of the gradient of the initial states alone.
    pool: jax.Ref  # [heads, K, V], not padded
    unread: jax.Ref  # an operand that is not read
    o: jax.Ref  # [rows, heads V]
    ht: jax.Ref  # [heads, V, K]
    M: jax.Ref  # [heads, 1, K]
    pool_out: jax.Ref  # [heads, K, V], not padded
    state: jax.Ref  # float32 [heads, V, K]; the Ref ht, if the final states are requested

    # Of the backward.
    do: jax.Ref  # [rows, heads V]
    dht: jax.Ref  # [heads, V, K]
    dq: jax.Ref  # [rows, keys K]
    dk: jax.Ref  # [rows, keys K]
    dv: jax.Ref  # [rows, heads V]
    dg: jax.Ref  # laid out as g; for constant gates [heads, 8, max(C, K)]
    dlog_weight: jax.Ref  # [chunks, heads, 1, C]
    dskip: jax.Ref  # [8, heads V], parts of a sum over the tokens of a row
    dh0: jax.Ref  # [heads, V, K]
    states: jax.Ref  # float32 [chunks or more, heads, V, K], before every chunk
    dstate: jax.Ref  # float32 [heads, V, K]; the Ref dh0, if that is requested
    pairs_t: jax.Ref  # float32 [heads, C, C], constant decays of pairs, transposed
    from_start: jax.Ref  # float32 [heads, C, K], of constant gates
    to_end: jax.Ref  # float32 [heads, C, K or V], of constant gates
    through: jax.Ref  # float32 [heads, 1, K], of constant gates
