"""The operands of the launches of all fused operators, and the static description of a launch, with the same names."""

from typing import Any, NamedTuple

import jax

from chunkwise.shared.kernels import gate_activation

# An array that a launch does not have. The operator and the launch tell which arrays there are; a type cannot.
_ABSENT: Any = None


class Operands(NamedTuple):
    """The arrays that a launch reads, in the layout of the kernels; None for an array that it does not have.

    Tokens are flat, [B, T, heads * lanes], with head dimensions padded to whole lanes. A kernel holds a state as
    [K, V], or transposed as [V, K]: see the package. The package says the layout of values per token, too.

    Attributes:
      table: int32 [rows, B * steps], the table of steps, see `layout.TableStep`.
      q, k: [B, T, H * K].
      v: [B, T, HV * V].
      g: decays in nats, or the raw gates of a law.
      beta: step sizes.
      e: erase keys, laid out as k; None where k erases, or k and b.
      b: erase gates [B, T, HV * K], which multiply erase keys.
      w: write gates [B, T, HV * V], which multiply values.
      gamma: constant gates [HV, 1, 1] float32.
      law: A_log and dt_bias of every gate, float32.
      initial_state: [N, HV, K, V] or [N, HV, V, K] float32.
      owner: int32 [B * NT, 1, lanes], the `coded_owners` of tokens where a chunk may hold several sequences.
      pool: the user's pool of states [slots, HV, K, V], in place of initial_state; it is neither padded nor transposed.
      A_inv: the inverses of all steps, float32, p heads side by side.
      scores: of all steps, the scores of queries, and below them the scores of keys, float32, p heads side by side.
      h: the states before all steps, [B, steps, HV, K, V] or [B, steps, HV, V, K].
      v_new_over_beta: the new values divided by beta, float32, laid out as v.
      do: the cotangent of the output, laid out as v.
      dht: the cotangent of the final states, laid out as initial_state.
    """

    table: jax.Array = _ABSENT
    q: jax.Array = _ABSENT
    k: jax.Array = _ABSENT
    v: jax.Array = _ABSENT
    g: jax.Array = _ABSENT
    beta: jax.Array = _ABSENT
    e: jax.Array | None = None
    b: jax.Array | None = None
    w: jax.Array | None = None
    gamma: jax.Array | None = None
    law: jax.Array | None = None
    initial_state: jax.Array | None = None
    owner: jax.Array | None = None
    pool: jax.Array | None = None
    A_inv: jax.Array = _ABSENT
    scores: jax.Array = _ABSENT
    h: jax.Array = _ABSENT
    v_new_over_beta: jax.Array = _ABSENT
    do: jax.Array = _ABSENT
    dht: jax.Array | None = None


class FusedStatic(NamedTuple):
    """The static description of a launch of a fused operator.

    Attributes:
      B, T: rows of the batch and their tokens.
      H, HV: heads of q and k, and of v: value head n reads key head n // (HV // H).
      K, V: head dimensions, padded to whole lanes.
      C: tokens of a chunk.
      N: how many states go in and out.
      steps: the steps of a row of the batch; each is some chunks, or a piece of one.
      scale: the number that multiplies the queries, or the output.
      config: tile sizes of the package.
      varlen: every packed sequence has a state, and a step is a piece of a chunk, of one sequence.
      partial: the last chunk of a row has rows that must not be read: they are past the end of the arrays, or a law
        would make decays of their zeros.
      chunks: chunks of a step.
      p: heads that lie side by side in the lanes.
      normalise: queries and keys are scaled to unit length first.
      compensate: step sizes make up for the rounding of keys, as `tiles.unit_keys` says, because step sizes may exceed
        1.
      gate_law: the law of raw gates, or None.
      base: rows of the diagonal blocks that one product covers, in the forward of KDA.
      backward_base: the same for its backward, where gradients of strong gates are as small as their decays.
      per_channel: gates are per channel of the key.
      constant: every chunk has the same decays: constant gates, whole chunks, one sequence.
      parts: how many bfloat16 parts computed tiles have in products: two where the gradient of constant gates is
        requested.
    """

    B: int
    T: int
    H: int
    HV: int
    K: int
    V: int
    C: int
    N: int
    steps: int
    scale: float
    config: Any
    varlen: bool
    partial: bool
    chunks: int = 1
    p: int = 1
    normalise: bool = False
    compensate: bool = False
    gate_law: gate_activation.Law | None = None
    base: int = 1
    backward_base: int = 1
    per_channel: bool = False
    constant: bool = False
    parts: int = 1

    @property
    def group(self) -> int:
        """Value heads that share a key head."""
        return self.HV // self.H

    def key_blocks(self, heads: int) -> tuple[int, int]:
        """Return the key heads of a block of value heads, and how many blocks share a key head."""
        return max(heads // self.group, 1), max(self.group // heads, 1)

    def sizes(self) -> dict[str, Any]:
        """Return the sizes that costs depend on, by name."""
        return dict(B=self.B, T=self.T, H=self.H, HV=self.HV, K=self.K, V=self.V, C=self.C)
