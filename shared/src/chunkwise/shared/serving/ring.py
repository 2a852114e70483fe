"""The rings of a pool after decodes: which rings are folded, the tokens added to them, and their numbers of tokens."""

import jax
import jax.numpy as jnp

from chunkwise.shared.kernels.spans import pools
from chunkwise.shared.serving import slot_rows, state_pool
from chunkwise.shared.serving.state_pool import StatePool


def folds(pool: StatePool, source: jax.Array, target: jax.Array, kept: jax.Array, most: int) -> jax.Array:
    """Return which decodes write a state, bool [n]: those whose ring has no room, or is not in their target slot.

    Args:
      pool: a pool with rings.
      source, target: the slots that the decodes start from and end in, int32 [n].
      kept: how many tokens of their rings are kept, int32 [n].
      most: the most tokens of a decode, for which there must be room.
    """
    return (kept > pool.replay - most) | (source != target)


def append(pool: StatePool, routes: pools.Routes, kept: jax.Array, folded: jax.Array, keys, writes, gates) -> StatePool:
    """Return the pool with the tokens of decodes added to the rings of their target slots, and counted.

    Args:
      pool: a pool with rings.
      routes: the routes of the decodes.
      kept, folded: how many tokens of the ring are kept, and whether the ring was folded, which empties it.
      keys: [n, W, H, K] float32.
      writes: [n, W, HV, V] float32.
      gates: [n, W, HV] or [n, W, HV, K] float32.
    """
    n, W, H = keys.shape[:3]
    by_row = lambda x: jnp.swapaxes(x.reshape(n, W, H, -1, *x.shape[3:]), 2, 3)  # [n, W, R, H, ...]
    t, tokens, before = jnp.arange(W, dtype=jnp.int32)[None], routes.end - routes.start, jnp.where(folded, 0, kept)
    # Tokens that do not exist are put past the end, where nothing is written.
    at = jnp.where(t < tokens[:, None], before[:, None] + t, pool.replay)
    slot = slot_rows.past_the_end(routes.target[:, :1], pool.shape[0])
    rows = dict(keys=keys, writes=by_row(writes), gates=by_row(gates).reshape(n, W, *pool.gates.shape[2:]))
    rings = {
        name: getattr(pool, name).at[slot, at].set(x.astype(getattr(pool, name).dtype), mode="drop")
        for name, x in rows.items()
    }
    return state_pool.with_counts(pool._replace(**rings), routes.target[:, 0], before + tokens, tokens)
