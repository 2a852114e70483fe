"""The contract: signatures and documentation; `operator` has the record that they call.

The functions have no body: `signature` hands their arguments to the method that stands above each of them. `options`
are keyword arguments of the function over whole sequences, and others that `forms` names.
"""

from typing import Unpack

import jax

from chunkwise.fused_gdn.config import Config
from chunkwise.fused_gdn.operator import OPERATOR
from chunkwise.shared.call import forms, signature
from chunkwise.shared.call.checks import Sharding
from chunkwise.shared.serving.state_pool import Pool


@signature.public_function(OPERATOR.chunk)
def chunk_gated_delta_rule(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    g: jax.Array | None,
    beta: jax.Array,
    scale: float | None = None,
    initial_state: jax.Array | None = None,
    output_final_state: bool = False,
    *,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool | str = False,
    A_log: jax.Array | None = None,
    dt_bias: jax.Array | None = None,
    lower_bound: float | None = None,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    cu_seqlens: jax.Array | None = None,
    segment_ids: jax.Array | None = None,
    chunk_size: int | None = None,
    implementation: str | None = None,
    sharding: Sharding | None = None,
    context_axis: str | tuple[str, ...] | None = None,
    disable_recompute: bool = False,
    config: Config | None = None,
) -> tuple[jax.Array, jax.Array | None]:
    """Gated delta rule over whole sequences, chunk by chunk, differentiable.

        S~  = e^g_t S_{t-1}
        S_t = S~ + beta_t k_t (v_t - S~^T k_t)^T
        o_t = scale S_t^T q_t

    Args:
      g: log decay [B, T, HV] in nats, at most 0, of any strength: -inf forgets everything before. None for no decay.
      disable_recompute: whether "fused" keeps the states before all chunks and the new values of its forward for the
        backward, which makes them again otherwise; static. The other implementations always keep them. It saves a
        launch. Under plain `jax.checkpoint` nothing more is kept; in a scan over layers without it, the copies of what
        is kept take longer than the launch.
      config: tile sizes of the kernels of "fused"; None for the best. If the value heads of a key head are too many for
        a grid step, they are divided, and q and k are repeated.

    Accuracy: RMS error over RMS of the float64 recurrence, for any gate. float32: o and states 3e-7, gradients 2e-6.
      bfloat16: o and states 3e-3, gradients of g and beta 6e-3, others 4e-3. The worst case is one key for all tokens,
      with beta 1.9 and no decay: float32 o 6e-6, gradients of g and beta 7e-5; bfloat16 o 3e-3, gradients of g and beta
      7e-2, others 5e-3. The cumulative gate, the inverse and the state are float32 in both.
    Cost: 2 B T HV (2 C K + 2 C V + 3 K V) flops, the backward twice as much; q, k, v are read and o is written once.
      The forward keeps for the backward the inputs and the float32 inverse, 4 B T HV C bytes. The backward of "fused"
      takes two launches: the states before every chunk, then one reverse pass. With disable_recompute the forward also
      keeps these states, in the type of the products, and the float32 new values, B T HV (2 K V / C + 4 V) bytes for
      bfloat16 tensors, and the backward takes one launch.
    Source: Yang, Kautz and Hatamizadeh, Gated Delta Networks (2024), section 3.3.
    """
    ...


@signature.public_function(OPERATOR.recurrent, chunk_gated_delta_rule)
def recurrent_gated_delta_rule(
    q: jax.Array, k: jax.Array, v: jax.Array, g: jax.Array | None, beta: jax.Array, scale: float | None = None,
    initial_state: jax.Array | None = None, output_final_state: bool = False,
    **options: Unpack[forms.Recurrent],
) -> tuple[jax.Array, jax.Array | None]:  # fmt: skip
    """Gated delta rule token by token, the decode path: one new token or a few for every sequence, in one launch.

    Accuracy: 3e-7 relative to the recurrence in float64, plus the rounding of o, and of a pool, to its type.
    Cost: 7 B T HV K V flops; the state of every sequence is read and written once.
    Source: Yang, Kautz and Hatamizadeh, Gated Delta Networks (2024).
    """
    ...


@signature.public_function(OPERATOR.ragged, chunk_gated_delta_rule)
def ragged_gated_delta_rule(
    q: jax.Array, k: jax.Array, v: jax.Array, g: jax.Array | None, beta: jax.Array, states: Pool,
    cu_seqlens: jax.Array, state_indices: jax.Array,
    **options: Unpack[forms.Ragged],
) -> tuple[jax.Array, Pool]:  # fmt: skip
    """Gated delta rule as one serving step: decodes, speculation and prefills over one pool of states."""
    ...


@signature.public_function(OPERATOR.chunk, chunk_gated_delta_rule)
def chunk_delta_rule(
    q: jax.Array, k: jax.Array, v: jax.Array, beta: jax.Array, scale: float | None = None,
    initial_state: jax.Array | None = None, output_final_state: bool = False, **options: Unpack[forms.Delta],
) -> tuple[jax.Array, jax.Array | None]:  # fmt: skip
    """Delta rule over whole sequences, chunk by chunk, differentiable: the gated delta rule without decay.

        S_t = S_{t-1} + beta_t k_t (v_t - S_{t-1}^T k_t)^T
        o_t = scale S_t^T q_t

    Accuracy: as `chunk_gated_delta_rule`.
    Cost: as `chunk_gated_delta_rule`.
    Source: Yang et al., Parallelizing Linear Transformers with the Delta Rule over Sequence Length (2024).
    """
    ...


@signature.public_function(OPERATOR.recurrent, chunk_delta_rule)
def recurrent_delta_rule(
    q: jax.Array, k: jax.Array, v: jax.Array, beta: jax.Array, scale: float | None = None,
    initial_state: jax.Array | None = None, output_final_state: bool = False, **options: Unpack[forms.Recurrent],
) -> tuple[jax.Array, jax.Array | None]:  # fmt: skip
    """Delta rule token by token, the decode path: one new token or a few for every sequence, in one launch.

    Accuracy: as `recurrent_gated_delta_rule`.
    Cost: as `recurrent_gated_delta_rule`.
    """
    ...


@signature.public_function(OPERATOR.ragged, chunk_delta_rule)
def ragged_delta_rule(
    q: jax.Array, k: jax.Array, v: jax.Array, beta: jax.Array, states: Pool, cu_seqlens: jax.Array,
    state_indices: jax.Array, **options: Unpack[forms.Ragged],
) -> tuple[jax.Array, Pool]:  # fmt: skip
    """Delta rule as one serving step: decodes, speculation and prefills over one pool of states."""
    ...
