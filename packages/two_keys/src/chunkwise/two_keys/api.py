"""The contract: signatures and documentation; `operator` has the records that they call.

The functions have no body: `signature` hands their arguments to the method that stands above each of them. `options`
are keyword arguments of the function over whole sequences, and others that `forms` names.
"""

from typing import Unpack

import jax

from chunkwise.kda import chunk_kda
from chunkwise.shared.call import forms, signature
from chunkwise.shared.serving.state_pool import Pool
from chunkwise.two_keys.operator import COMBA, GDN2


@signature.public_function(GDN2.chunk, chunk_kda)
def chunk_gdn2(
    q: jax.Array, k: jax.Array, v: jax.Array, g: jax.Array | None, b: jax.Array, w: jax.Array,
    scale: float | None = None, initial_state: jax.Array | None = None, output_final_state: bool = False, *,
    use_erase_sigmoid_in_kernel: bool = False, use_write_sigmoid_in_kernel: bool = False,
    **options: Unpack[forms.Delta],
) -> tuple[jax.Array, jax.Array | None]:  # fmt: skip
    """GDN-2, the gated delta rule with erase and write gates, over whole sequences, chunk by chunk, differentiable.

        S~  = Diag(e^g_t) S_{t-1}
        S_t = S~ + k_t (w_t * v_t - S~^T p_t)^T,    p_t = b_t * k_t
        o_t = scale S_t^T q_t

    The implementation "fused" runs the kernels of `chunk_kda`.

    Args:
      g: log decay per channel [B, T, HV, K] in nats, at most 0, of any strength: -inf forgets everything before.
        None for no decay.
      b: erase gates [B, T, HV, K], from 0 to 1, or to 2 if negative eigenvalues are allowed. |k . p| must be at most 2,
        otherwise states grow without bound.
      w: write gates [B, T, HV, V].
      use_qk_l2norm_in_kernel: replace q and k by x * rsqrt(sum x^2 + 1e-6), in float32; static. Erase gates multiply
        the keys of unit length.
      use_erase_sigmoid_in_kernel: b is raw, and the erase gate is sigmoid(b), in float32; static.
      use_write_sigmoid_in_kernel: w is raw, and the write gate is sigmoid(w), in float32; static.
      allow_neg_eigval: with use_erase_sigmoid_in_kernel, the erase gate is 2 sigmoid(b); static.

    Accuracy: as `chunk_kda`, also with erase gates up to 2 and repeated keys.
    Cost: 2 B T HV (2 C K + 2 C V + 3 K V) flops, the backward twice as much; every tensor is read once and o is written
      once.
    Source: Gated DeltaNet 2; docs/two-keys.md has the chunk form and the special cases.
    """
    ...


@signature.public_function(GDN2.recurrent, chunk_gdn2)
def recurrent_gdn2(
    q: jax.Array, k: jax.Array, v: jax.Array, g: jax.Array | None, b: jax.Array, w: jax.Array,
    scale: float | None = None, initial_state: jax.Array | None = None, output_final_state: bool = False,
    **options: Unpack[forms.Recurrent],
) -> tuple[jax.Array, jax.Array | None]:  # fmt: skip
    """GDN-2, the gated delta rule with erase and write gates, token by token, the decode path.

    Accuracy: RMS error over RMS of the float64 recurrence below 1e-5 in float32.
    Cost: 7 B T HV K V flops; every state is read and written once.
    """
    ...


@signature.public_function(GDN2.ragged, chunk_gdn2)
def ragged_gdn2(
    q: jax.Array, k: jax.Array, v: jax.Array, g: jax.Array | None, b: jax.Array, w: jax.Array, states: Pool,
    cu_seqlens: jax.Array, state_indices: jax.Array,
    **options: Unpack[forms.Ragged],
) -> tuple[jax.Array, Pool]:  # fmt: skip
    """GDN-2, the gated delta rule with erase and write gates, as one serving step."""
    ...


@signature.public_function(COMBA.chunk, chunk_kda)
def chunk_comba(
    q: jax.Array, k: jax.Array, v: jax.Array, p: jax.Array, g: jax.Array | None, beta: jax.Array,
    scale: float | None = None, initial_state: jax.Array | None = None, output_final_state: bool = False,
    **options: Unpack[forms.Delta],
) -> tuple[jax.Array, jax.Array | None]:  # fmt: skip
    """Comba, the gated delta rule with separate erase keys, over whole sequences, chunk by chunk, differentiable.

        S_t = e^g_t S_{t-1} + beta_t k_t (v_t - S_{t-1}^T p_t)^T
        o_t = scale S_t^T q_t

    The implementation "fused" runs the kernels of `chunk_kda`.

    Args:
      p: erase keys [B, T, H, K].
      g: log decay [B, T, HV] in nats, at most 0, of any strength. A gate of -inf keeps nothing of the state before, but
        p_t still reads it: to begin a sequence give its boundaries, or a p_t of zeros beside that gate. None for no
        decay.
      beta: step sizes [B, T, HV]. beta k . p must be from e^g - 1 to e^g + 1, otherwise states grow without bound.
      use_qk_l2norm_in_kernel: replace q, k and p by x * rsqrt(sum x^2 + 1e-6), in float32; static.

    Accuracy: as `chunk_kda`, also with erase gates up to 2 and repeated keys.
    Cost: 2 B T HV (2 C K + 2 C V + 3 K V) flops, the backward twice as much; every tensor is read once and o is written
      once.
    Source: Comba (2025); docs/two-keys.md has the chunk form and the special cases.
    """
    ...


@signature.public_function(COMBA.recurrent, chunk_comba)
def recurrent_comba(
    q: jax.Array, k: jax.Array, v: jax.Array, p: jax.Array, g: jax.Array | None, beta: jax.Array,
    scale: float | None = None, initial_state: jax.Array | None = None, output_final_state: bool = False,
    **options: Unpack[forms.Recurrent],
) -> tuple[jax.Array, jax.Array | None]:  # fmt: skip
    """Comba, the gated delta rule with separate erase keys, token by token, the decode path.

    Accuracy: RMS error over RMS of the float64 recurrence below 1e-5 in float32.
    Cost: 7 B T HV K V flops; every state is read and written once.
    """
    ...


@signature.public_function(COMBA.ragged, chunk_comba)
def ragged_comba(
    q: jax.Array, k: jax.Array, v: jax.Array, p: jax.Array, g: jax.Array | None, beta: jax.Array, states: Pool,
    cu_seqlens: jax.Array, state_indices: jax.Array,
    **options: Unpack[forms.Ragged],
) -> tuple[jax.Array, Pool]:  # fmt: skip
    """Comba, the gated delta rule with separate erase keys, as one serving step."""
    ...
