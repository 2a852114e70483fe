"""The state's way through the chunks in plain JAX: a scan over chunks, batched over the rows of the batch."""

import jax
import jax.numpy as jnp
from jax import lax

from chunkwise.chunk_h import kernel, tile
from chunkwise.shared import compat


def end_decays(g: jax.Array, end: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the decay from each token to the end of the chunk, and the decay over the whole chunk.

    Cumulative gates are [NC, HV, C, 1] per head or [NC, HV, C, K] per channel. The first decays have the same shape,
    the second ones [NC, HV, 1, 1] or [NC, HV, K, 1]. No gate follows the rows from `end` [NC] on, or at least the last
    row: their decay is the constant 1, so that it adds no gradient that swamps gradients of decays of e^-30.
    """
    g_last, C = g[:, :, -1:], g.shape[2]
    before = jnp.arange(C, dtype=jnp.int32)[None] < jnp.minimum(end, C - 1)[:, None]  # [NC, C]
    return jnp.exp(jnp.where(before[:, None, :, None], g_last - g, 0.0)), jnp.swapaxes(jnp.exp(g_last), -1, -2)


def states(k, w, u, to_end, through, initial_state, table: kernel.Table, B: int):
    """Take the states through the chunks.

    Args:
      k, w, u, initial_state: chunks and states, as in `kernel.ChunkHOperands`.
      to_end: [NC, HV, C, 1 or K], the decay from each token to the end of the chunk.
      through: [NC, HV, 1 or K, 1], the decay over the whole chunk.
      table: the table of the kernel.
      B: rows of the batch; the chunks of a row are consecutive and rows run side by side.

    Returns:
      h [NC, HV, K, V], v_new [NC, HV, C, V] and the state after every chunk [NC, HV, K, V], all float32.
    """
    zeros = compat.varying_zeros((B, u.shape[1], k.shape[-1], u.shape[-1]), k, w, u, to_end, initial_state)

    def one_head(S, k, w, u, to_end, through, action, sequence):
        start = 0.0 if initial_state is None else initial_state[sequence]
        S = jnp.where(action == kernel.RESTART, start, S)
        v_new = tile.new_values_tile(S, w, u)
        after = tile.next_state_tile(S, k, v_new, to_end, through)
        return after, (jnp.where(action == kernel.UNUSED, 0.0, S), v_new, after)

    NT = u.shape[0] // B

    def over_time(a):
        if a is None:
            return None
        a = jnp.moveaxis(a.reshape(B, NT, *a.shape[1:]), 1, 0)
        # A loop of one step is unrolled, and the CPU backend of XLA (jax 0.10 to 0.12) then fuses the products of all
        # stages into one operation that computes garbage. A second chunk, of zeros, keeps the loop.
        return a if NT > 1 else jnp.concatenate([a, jnp.zeros_like(a)])

    chunks = tuple(over_time(a) for a in (k, w, u, to_end, through, *table))
    body = jax.vmap(one_head, in_axes=(0, *(None if a is None else 0 for a in chunks)))
    _, results = lax.scan(lambda S, chunk: body(S, *chunk), zeros, chunks)
    return tuple(jnp.moveaxis(y[:NT], 0, 1).reshape(-1, *y.shape[2:]) for y in results)
