"""The same operator in plain JAX, token by token: the yardstick, and what None selects where there is no TPU."""

import functools

import jax

from chunkwise.shared import token_by_token


@functools.partial(jax.jit, static_argnums=(8, 9))
def gated_delta_rule(q, k, v, g, beta, scale, initial_state, cu_seqlens, output_final_state, normalise):
    """Run the recurrence in float32; the arguments of the operators, q and k [B, T, H, K]."""
    o, state = token_by_token(q, k, v, g, beta, scale, initial_state, cu_seqlens, normalise)
    return o, state if output_final_state else None
