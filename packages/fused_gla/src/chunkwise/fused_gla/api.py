"""The contract: signatures and documentation; `operator` has the records that they call.

The functions have no body: `signature` hands their arguments to the method that stands above each of them. `options`
are keyword arguments of the function over whole sequences, and others that `forms` names.
"""

from typing import Unpack

import jax

from chunkwise.fused_gla.config import Config
from chunkwise.fused_gla.operator import GLA, SIMPLE_GLA
from chunkwise.shared.call import forms, signature
from chunkwise.shared.call.checks import Sharding
from chunkwise.shared.serving.state_pool import Pool


@signature.public_function(SIMPLE_GLA.chunk)
def chunk_simple_gla(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    g: jax.Array | None = None,
    g_gamma: jax.Array | None = None,
    scale: float | None = None,
    initial_state: jax.Array | None = None,
    output_final_state: bool = False,
    *,
    cu_seqlens: jax.Array | None = None,
    segment_ids: jax.Array | None = None,
    chunk_size: int | None = None,
    implementation: str | None = None,
    sharding: Sharding | None = None,
    context_axis: str | tuple[str, ...] | None = None,
    config: Config | None = None,
) -> tuple[jax.Array, jax.Array | None]:
    """Gated linear attention with a gate per head, over whole sequences, chunk by chunk, differentiable.

        S_t = e^(g_t + g_gamma) S_{t-1} + k_t v_t^T
        o_t = scale S_t^T q_t

    With constant gates g_gamma this is retention or lightning attention.

    Args:
      g: log decay per head [B, T, HV] in nats, at most 0, of any strength: -inf forgets everything before. It has any
        of these types, or is None for no such decay.
      g_gamma: constant log decay per head [HV] in nats, of a floating type, added to g; None for no such decay. If its
        gradient is requested, computed tiles keep 16 bits in bfloat16 products, because the gradient is a sum over all
        tokens, whose terms cancel.

    Raises:
      NotImplementedError: "fused", if a head is too large for fast memory.

    Accuracy: 3e-7 relative to the recurrence in float64 for float32 inputs, 3e-3 for bfloat16 inputs; any gate.
    Cost: 2 B T (H C K + HV C V + 2 HV K V) flops, and q, k, v are read and o is written once; the backward reads q, k,
      v, do and one state for every `num_steps` chunks, and writes dq, dk, dv. If the value heads of a key head are more
      than a grid step takes, every step writes float32 sums of dq and dk. With states in or out a packed batch also
      pays for the state of every sequence.
    Source: Dao and Gu, Transformers are SSMs (2024); Sun et al., Retentive Network (2023), for constant gates.
    """
    ...


@signature.public_function(GLA.chunk, chunk_simple_gla)
def chunk_gla(
    q: jax.Array, k: jax.Array, v: jax.Array, g: jax.Array | None, scale: float | None = None,
    initial_state: jax.Array | None = None, output_final_state: bool = False, **options: Unpack[forms.Linear],
) -> tuple[jax.Array, jax.Array | None]:  # fmt: skip
    """Gated linear attention with a gate per channel, over whole sequences, chunk by chunk, differentiable.

        S_t = Diag(e^g_t) S_{t-1} + k_t v_t^T
        o_t = scale S_t^T q_t

    Args:
      g: log decay per channel of the key [B, T, HV, K] in nats, at most 0, of any strength: -inf forgets everything
        before. It has any of these types. None for no decay, as `chunk_simple_gla` without gates.

    Raises:
      NotImplementedError: "fused", if a head is too large for fast memory.

    Accuracy: 3e-7 relative to the recurrence in float64 for float32 inputs, 3e-3 for bfloat16 inputs; any gate.
    Cost: 2 B T HV (C K + C V + 2 K V) flops, and q, k, v are read and o is written once; the backward reads q, k, v, do
      and one state for every few chunks, and writes dq, dk, dv. With states in or out a packed batch also pays for the
      state of every sequence.
    Source: Yang et al., Gated Linear Attention Transformers (2023), sections 3 and 4.
    """
    ...


@signature.public_function(SIMPLE_GLA.recurrent, chunk_simple_gla)
def recurrent_simple_gla(
    q: jax.Array, k: jax.Array, v: jax.Array, g: jax.Array | None = None, g_gamma: jax.Array | None = None,
    scale: float | None = None, initial_state: jax.Array | None = None, output_final_state: bool = False,
    **options: Unpack[forms.Recurrent],
) -> tuple[jax.Array, jax.Array | None]:  # fmt: skip
    """Return simple gated linear attention token by token, in one launch.

    Args:
      g_gamma: constant log decay per head [HV] in nats, of a floating type, added to g; None for no such decay.

    Accuracy: 1e-6 relative to float64 for float32 inputs; the arithmetic is float32.
    Cost: 5 B T HV K V flops; every state is read and written once.
    Source: Dao and Gu, Transformers are SSMs (2024); Sun et al., Retentive Network (2023) for a constant gate.
    """
    ...


@signature.public_function(GLA.recurrent, chunk_gla)
def recurrent_gla(
    q: jax.Array, k: jax.Array, v: jax.Array, g: jax.Array | None, scale: float | None = None,
    initial_state: jax.Array | None = None, output_final_state: bool = False, **options: Unpack[forms.Recurrent],
) -> tuple[jax.Array, jax.Array | None]:  # fmt: skip
    """Return gated linear attention, with a gate per channel, token by token, in one launch.

    Accuracy: 1e-6 relative to float64 for float32 inputs; the arithmetic is float32.
    Cost: 5 B T HV K V flops; every state is read and written once.
    Source: Yang et al., Gated Linear Attention Transformers (2023).
    """
    ...


@signature.public_function(SIMPLE_GLA.ragged, chunk_simple_gla)
def ragged_simple_gla(
    q: jax.Array, k: jax.Array, v: jax.Array, g: jax.Array | None, states: Pool, cu_seqlens: jax.Array,
    state_indices: jax.Array, *, g_gamma: jax.Array | None = None, **options: Unpack[forms.Ragged],
) -> tuple[jax.Array, Pool]:  # fmt: skip
    """Simple gated linear attention as one serving step: decodes, speculation and prefills over one pool of states.

    It serves retention, lightning attention and Mamba-2, too.

    Args:
      g_gamma: constant log decay per head [HV] in nats, of a floating type, added to g; None for no such decay.
    """
    ...


@signature.public_function(GLA.ragged, chunk_gla)
def ragged_gla(
    q: jax.Array, k: jax.Array, v: jax.Array, g: jax.Array | None, states: Pool, cu_seqlens: jax.Array,
    state_indices: jax.Array, **options: Unpack[forms.Ragged],
) -> tuple[jax.Array, Pool]:  # fmt: skip
    """Gated linear attention as one serving step: decodes, speculation and prefills over one pool of states."""
    ...
