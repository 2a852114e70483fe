"""The operands of the launches of all fused operators, by one set of names."""

from typing import Any, NamedTuple


class Operands(NamedTuple):
    """The arrays that a launch reads, in the layout of the kernels; None for an array that it does not have.

    Tokens are flat, [B, T, heads * lanes], with head dimensions padded to whole lanes. A kernel holds a state as
    [K, V], or transposed as [V, K]: see the package. The package says the layout of values per token, too.

    Attributes:
      table: int32 [rows, B * steps], the table of steps, see `layout.Step`.
      q, k: [B, T, H * K].
      v: [B, T, HV * V].
      g: decays in nats, or the raw gates of a law.
      beta: step sizes.
      gamma: constant gates [HV, 1, 1] float32.
      law: A_log and dt_bias of every gate, float32.
      initial_state: [N, HV, K, V] or [N, HV, V, K] float32.
      owner: int32 [B * NT, 1, lanes], the `coded_owners` of tokens where a chunk may hold several sequences.
      pool: states [slots, HV, K, V] of the user in place of initial_state: neither padded nor transposed.
      X: the inverses of all steps, float32, p heads side by side.
      scores: the scores of queries above those of keys of all steps, float32, p heads side by side.
      h: the states before all steps, [B, steps, HV, K, V] or [B, steps, HV, V, K].
      W: float32 like v, the new values over beta.
      do: the cotangent of the output, like v.
      dht: the cotangent of the final states, like initial_state.
    """

    # Which of them are arrays is known from the operator and the launch, which a type cannot tell.
    table: Any = None
    q: Any = None
    k: Any = None
    v: Any = None
    g: Any = None
    beta: Any = None
    gamma: Any = None
    law: Any = None
    initial_state: Any = None
    owner: Any = None
    pool: Any = None
    X: Any = None
    scores: Any = None
    h: Any = None
    W: Any = None
    do: Any = None
    dht: Any = None
