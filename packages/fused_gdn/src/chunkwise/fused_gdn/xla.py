"""The same operator in plain JAX, token by token: the yardstick, and the path without a TPU."""

import functools

import jax
import jax.numpy as jnp

from chunkwise.shared import l2norm, packed_recurrence, recurrence


@functools.partial(jax.jit, static_argnums=(8, 9))
def gated_delta_rule(q, k, v, g, beta, scale, initial_state, cu_seqlens, output_final_state, normalise):
    """Run the recurrence in float32; the arguments of the operators, q and k [B, T, H, K]."""
    q, k = q.astype(jnp.float32), k.astype(jnp.float32)
    if normalise:
        q, k = l2norm(q), l2norm(k)
    q, k = (jnp.repeat(x, v.shape[2] // x.shape[2], axis=2) for x in (q, k))
    if cu_seqlens is None:
        o, state = recurrence(q, k, v, g, beta, scale, initial_state, jnp.float32)
    else:
        o, state = packed_recurrence(q, k, v, g, beta, scale, initial_state, cu_seqlens, jnp.float32)
    return o.astype(v.dtype), state if output_final_state else None
