"""The contract: signatures and documentation; `operator` has the functions that they call.

The functions have no body: `signature` hands their arguments to the method that stands above each of them. `options`
are keyword arguments of the function over whole sequences, and others that `forms` names.
"""

from typing import Unpack

import jax

from chunkwise.dplr import operator
from chunkwise.kda import chunk_kda
from chunkwise.shared.call import forms, signature
from chunkwise.shared.serving.state_pool import Pool


@signature.public_function_by_name(operator.chunk, "chunk", chunk_kda)
def chunk_dplr_delta_rule(
    q: jax.Array, k: jax.Array, v: jax.Array, a: jax.Array, b: jax.Array, gk: jax.Array, scale: float | None = None,
    initial_state: jax.Array | None = None, output_final_state: bool = False, *, min_gate: float | None = None,
    **options: Unpack[forms.Linear],
) -> tuple[jax.Array, jax.Array | None]:  # fmt: skip
    """The delta rule with diagonal plus low-rank transitions over whole sequences, chunk by chunk, differentiable.

        S_t = Diag(e^gk_t) S_{t-1} + b_t (S_{t-1}^T a_t)^T + k_t v_t^T
        o_t = scale S_t^T q_t

    a reads the state before its decay. It is the delta rule with two keys over 2 T tokens, by the kernels of KDA.

    Args:
      a: keys [B, T, H, K] that read the state, without a minus sign: an erasing one points against b.
      b: keys [B, T, H, K] that write what a has read. Without decays |a . b| must be at most 2, with a . b at most 0,
        otherwise states grow without bound.
      gk: log decay per channel [B, T, HV, K] in nats, at most 0, of any strength. A gate of -inf keeps nothing of the
        state before, but a_t still reads it: to begin a sequence give its boundaries, or an a_t of zeros beside it.
      chunk_size: tokens of a chunk of the delta rule with two keys, of which a token takes two, one of 16, 32, 64, 128,
        or None for the best; static.
      min_gate: a promise that no log decay is below it, in nats; None or a number, static. It changes none. As in
        `chunk_kda`, a promise of -16.6 or more saves products.

    Accuracy: as `chunk_kda` over 2 T tokens.
    Cost: that of `chunk_kda` with erase keys over 2 T tokens; without "fused" also one copy of every tensor.
    Source: Peng et al., RWKV-7 "Goose" (2025), for its vectors a and b; docs/composition.md has the reduction.
    """
    ...


@signature.public_function_by_name(operator.chunk, "chunk", chunk_dplr_delta_rule)
def chunk_rwkv7(
    r: jax.Array, w: jax.Array, k: jax.Array, v: jax.Array, a: jax.Array, b: jax.Array, scale: float | None = 1.0,
    initial_state: jax.Array | None = None, output_final_state: bool = False, **options: Unpack[forms.Delta],
) -> tuple[jax.Array, jax.Array | None]:  # fmt: skip
    """RWKV-7 over whole sequences, chunk by chunk, differentiable.

        S_t = Diag(e^w_t) S_{t-1} + b_t (S_{t-1}^T a_t)^T + k_t v_t^T
        o_t = scale S_t^T r_t

    It is `chunk_dplr_delta_rule` in other names. The model has a = -kappa and b = kappa * eta, for a removal key kappa
    of unit length and rates eta from 0 to 1.

    Args:
      r: receptances, the queries [B, T, H, K].
      w: log decay per channel [B, T, HV, K] in nats, at most 0; the model has -e^-0.5 sigmoid of its output, so that
        the promise min_gate=-0.61 holds.
      k: keys [B, T, H, K].
      min_gate: as in `chunk_dplr_delta_rule`, of w.
      scale: multiplies the output; a number, which is static, or a scalar array, which may be traced.

    Accuracy: as `chunk_kda` over 2 T tokens.
    Cost: that of `chunk_kda` with erase keys over 2 T tokens; without "fused" also one copy of every tensor.
    Source: Peng et al., RWKV-7 "Goose" (2025).
    """
    ...


@signature.public_function_by_name(operator.recurrent, "recurrent", chunk_dplr_delta_rule)
def recurrent_dplr_delta_rule(
    q: jax.Array, k: jax.Array, v: jax.Array, a: jax.Array, b: jax.Array, gk: jax.Array, scale: float | None = None,
    initial_state: jax.Array | None = None, output_final_state: bool = False, **options: Unpack[forms.Recurrent],
) -> tuple[jax.Array, jax.Array | None]:  # fmt: skip
    """The delta rule with diagonal plus low-rank transitions token by token, the decode path.

    Accuracy: RMS error over RMS of the float64 recurrence below 1e-5 in float32.
    Cost: 9 B T HV K V flops; every state is read and written once.
    """
    ...


@signature.public_function_by_name(operator.recurrent, "recurrent", chunk_rwkv7)
def recurrent_rwkv7(
    r: jax.Array, w: jax.Array, k: jax.Array, v: jax.Array, a: jax.Array, b: jax.Array, scale: float | None = 1.0,
    initial_state: jax.Array | None = None, output_final_state: bool = False, **options: Unpack[forms.Recurrent],
) -> tuple[jax.Array, jax.Array | None]:  # fmt: skip
    """RWKV-7 token by token, the decode path.

    Accuracy: RMS error over RMS of the float64 recurrence below 1e-5 in float32.
    Cost: 9 B T HV K V flops; every state is read and written once.
    """
    ...


@signature.public_function_by_name(operator.ragged, "ragged", chunk_dplr_delta_rule)
def ragged_dplr_delta_rule(
    q: jax.Array, k: jax.Array, v: jax.Array, a: jax.Array, b: jax.Array, gk: jax.Array, states: Pool,
    cu_seqlens: jax.Array, state_indices: jax.Array, **options: Unpack[forms.Ragged],
) -> tuple[jax.Array, Pool]:  # fmt: skip
    """The delta rule with diagonal plus low-rank transitions as one serving step, of RWKV-7 with scale=1.0.

    The boundaries, the blocks and the accepted tokens count tokens of q. A token takes two of the tokens of a ring, so
    `make_pool` needs twice as many.
    """
    ...
