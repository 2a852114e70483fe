"""The contract: signatures and documentation; `operator` has the functions that they call.

The functions have no body: `signature` hands their arguments to the method that stands above each of them. `options`
are keyword arguments of the function over whole sequences, and others that `forms` names.
"""

from typing import Unpack

import jax

from chunkwise.delta_product import operator
from chunkwise.fused_gdn import chunk_gated_delta_rule
from chunkwise.shared.call import forms, signature
from chunkwise.shared.serving.state_pool import Pool


@signature.public_function_by_name(operator.chunk, "chunk", chunk_gated_delta_rule)
def chunk_gated_delta_product(
    q: jax.Array, k: jax.Array, v: jax.Array, g: jax.Array | None, beta: jax.Array, num_householder: int,
    scale: float | None = None, initial_state: jax.Array | None = None, output_final_state: bool = False,
    **options: Unpack[forms.Delta],
) -> tuple[jax.Array, jax.Array | None]:  # fmt: skip
    """Gated DeltaProduct over whole sequences, chunk by chunk, differentiable.

        S  = e^g_t S_{t-1}
        S <- S + beta_i k_i (v_i - S^T k_i)^T      for i = n t, ..., n t + n - 1
        o_t = scale S^T q_t                        S_t = S

    A token decays the state once, and then takes n steps of the delta rule. This is `chunk_gated_delta_rule` over T n
    tokens, whose kernels run.

    Args:
      q: queries [B, T, H, K].
      k: keys [B, T n, H, K], the n keys of a token next to each other.
      v: values [B, T n, HV, V].
      g: log decay [B, T, HV] in nats, at most 0, of any strength: -inf forgets everything before. None for no decay,
        which is DeltaProduct.
      beta: step sizes [B, T n, HV], in (0, 1), or in (0, 2) if negative eigenvalues are allowed. Keys should have unit
        length (or pass use_qk_l2norm_in_kernel): the recurrence itself diverges if beta |k|^2 > 2.
      num_householder: n, the steps of a token; static.
      chunk_size: tokens of a chunk of the gated delta rule, of which a token takes n, one of 16, 32, 64, 128, or None
        for the best; static.
      disable_recompute: as of `chunk_gated_delta_rule`; static.
      config: tile sizes of the kernels of "fused"; None for the best.

    Accuracy: as `chunk_gated_delta_rule` over T n tokens.
    Cost: that of `chunk_gated_delta_rule` over T n tokens; without "fused" also one copy of q, g and o.
    Source: Siems et al., DeltaProduct (2025).
    """
    ...


@signature.public_function_by_name(operator.recurrent, "recurrent", chunk_gated_delta_product)
def recurrent_gated_delta_product(
    q: jax.Array, k: jax.Array, v: jax.Array, g: jax.Array | None, beta: jax.Array, num_householder: int,
    scale: float | None = None, initial_state: jax.Array | None = None, output_final_state: bool = False,
    **options: Unpack[forms.Recurrent],
) -> tuple[jax.Array, jax.Array | None]:  # fmt: skip
    """Gated DeltaProduct token by token, the decode path: one new token or a few for every sequence, in one launch.

    Args:
      q: queries [B, T, H, K].
      k: keys [B, T n, H, K], the n keys of a token next to each other.
      v: values [B, T n, HV, V].

    Accuracy: 3e-7 relative to the recurrence in float64, plus the rounding of o, and of a pool, to its type.
    Cost: 7 n B T HV K V flops; the state of every sequence is read and written once.
    """
    ...


@signature.public_function_by_name(operator.ragged, "ragged", chunk_gated_delta_product)
def ragged_gated_delta_product(
    q: jax.Array, k: jax.Array, v: jax.Array, g: jax.Array | None, beta: jax.Array, num_householder: int,
    states: Pool, cu_seqlens: jax.Array, state_indices: jax.Array, **options: Unpack[forms.Ragged],
) -> tuple[jax.Array, Pool]:  # fmt: skip
    """Gated DeltaProduct as one serving step: decodes, speculation and prefills over one pool of states.

    The boundaries, the blocks and the accepted tokens count tokens of q. A token takes n of the tokens of a ring, so
    `make_pool` needs n times as many. Decodes of at most 4 / n tokens take the kernel that is best for decodes.
    """
    ...
