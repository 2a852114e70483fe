"""The contract: signatures and documentation; `operator` has the record that they call.

The functions have no body: `signature` hands their arguments to the method that stands above each of them. `options`
are keyword arguments of the function over whole sequences, and others that `forms` names.
"""

from typing import Unpack

import jax

from chunkwise.kda.config import Config
from chunkwise.kda.operator import OPERATOR
from chunkwise.shared.call import forms, signature
from chunkwise.shared.call.checks import Sharding
from chunkwise.shared.serving.state_pool import Pool


@signature.public_function(OPERATOR.chunk)
def chunk_kda(
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
    min_gate: float | None = None,
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
    config: Config | None = None,
) -> tuple[jax.Array, jax.Array | None]:
    """Kimi delta attention over whole sequences, chunk by chunk, differentiable.

        S~  = Diag(e^g_t) S_{t-1}
        S_t = S~ + beta_t k_t (v_t - S~^T k_t)^T
        o_t = scale S_t^T q_t

    With use_gate_in_kernel, the kernels read raw gates in their type, and no decays are written to memory.

    Args:
      g: log decay per channel [B, T, HV, K] in nats, at most 0, of any strength: -inf forgets everything before.
        None for no decay.

    Accuracy: RMS error over RMS of the float64 recurrence below 1e-5 for float32 and .005 for bfloat16 inputs, for any
      gate, repeated keys and beta up to 2; gradients below 1e-4 and .008 (g and beta .02, and .04 if K is 128, there is
      one key for all tokens, beta is near 2 and nothing decays). With bfloat16 tensors the forward kernel computes
      softplus of raw gates to 4e-6.
    Cost: 2 B T HV (2 C K + 2 C V + 3 K V) flops, the backward twice as much; q, k, v and g are read and o is written
      once.
    Source: Kimi Linear (2025), section 3; the page docs/kda.md describes the products of the levels and the inverse.
    """
    ...


@signature.public_function(OPERATOR.recurrent, chunk_kda)
def recurrent_kda(
    q: jax.Array, k: jax.Array, v: jax.Array, g: jax.Array | None, beta: jax.Array, scale: float | None = None,
    initial_state: jax.Array | None = None, output_final_state: bool = False,
    **options: Unpack[forms.Recurrent],
) -> tuple[jax.Array, jax.Array | None]:  # fmt: skip
    """Kimi delta attention token by token, the decode path: one new token or a few for every sequence, in one launch.

    Accuracy: 5e-7 relative to the recurrence in float64; everything is computed in float32, with sums in the place of
      matrix products.
    Cost: 7 B T HV K V flops; every state is read and written once.
    Source: Kimi Linear (2025).
    """
    ...


@signature.public_function(OPERATOR.ragged, chunk_kda)
def ragged_kda(
    q: jax.Array, k: jax.Array, v: jax.Array, g: jax.Array | None, beta: jax.Array, states: Pool,
    cu_seqlens: jax.Array, state_indices: jax.Array,
    **options: Unpack[forms.Ragged],
) -> tuple[jax.Array, Pool]:  # fmt: skip
    """Kimi delta attention as one serving step: decodes, speculation and prefills over one pool of states."""
    ...
