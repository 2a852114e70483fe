"""The same pass in plain JAX: a scan over chunks, batched over the rows of the batch."""

import jax
import jax.numpy as jnp
from jax import lax

from chunkwise.chunk_h.kernel import RESTART, UNUSED, new_values_tile, next_state_channels_tile, next_state_tile
from chunkwise.shared import varying_zeros


def end_decays(g: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return e^(G_last - G) [NC, HV, 1, C] and e^G_last [NC, HV, 1, 1] for cumulative gates g [NC, HV, 1, C]."""
    g_last = g[..., -1:]
    return jnp.exp(g_last - g), jnp.exp(g_last)


def states(k, w, u, to_end, through, gk, initial_state, action, sequence, B: int):
    """Run the pass on chunks.

    Args:
      k, w, u, gk, initial_state: chunks and states, as in `kernel.Operands`.
      to_end: [NC, HV, 1, C], the decay from each token to the end of the chunk; None with gk.
      through: [NC, HV, 1, 1], the decay over the whole chunk; None with gk.
      action, sequence: int32 [NC], as in the kernel.
      B: rows of the batch; the chunks of a row are consecutive and rows run side by side.

    Returns:
      h [NC, HV, K, V], v_new [NC, HV, C, V] and the state after every chunk [NC, HV, K, V], all float32.
    """
    zeros = varying_zeros((B, u.shape[1], k.shape[-1], u.shape[-1]), k, w, u, to_end, gk, initial_state)

    def tile(S, k, w, u, to_end, through, gk, action, sequence):
        start = 0.0 if initial_state is None else initial_state[sequence]
        S = jnp.where(action == RESTART, start, S)
        v_new = new_values_tile(S, w, u)
        if gk is None:
            after = next_state_tile(S, k, v_new, jnp.swapaxes(to_end, -1, -2), through)
        else:
            after = next_state_channels_tile(S, k, v_new, gk)
        return after, (jnp.where(action == UNUSED, 0.0, S), v_new, after)

    def over_time(a):
        return None if a is None else jnp.moveaxis(a.reshape(B, -1, *a.shape[1:]), 1, 0)

    chunks = tuple(over_time(a) for a in (k, w, u, to_end, through, gk, action, sequence))
    body = jax.vmap(tile, in_axes=(0, *(None if a is None else 0 for a in chunks)))
    _, results = lax.scan(lambda S, chunk: body(S, *chunk), zeros, chunks)
    return tuple(jnp.moveaxis(y, 0, 1).reshape(-1, *y.shape[2:]) for y in results)
