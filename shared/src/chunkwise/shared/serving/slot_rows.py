"""Rows of an array [slots, ...] by their slots, which need not exist."""

import jax
import jax.numpy as jnp

from chunkwise.shared.call.arguments import Slots


def read(x: jax.Array, slots: jax.Array) -> jax.Array:
    """Return the rows of some slots, int32 [n]; zeros for a slot that is negative or past the end."""
    return x.at[past_the_end(slots, x.shape[0])].get(mode="fill", fill_value=0)


def write(x: jax.Array, slots: jax.Array, rows: jax.Array) -> jax.Array:
    """Return x with these rows in some slots, in its type; a slot that is negative or past the end is not written."""
    return x.at[past_the_end(slots, x.shape[0])].set(rows.astype(x.dtype), mode="drop")


def past_the_end(slots: jax.Array, count: int) -> jax.Array:
    """Return slots, with negative slots moved past the end, because JAX would count them from the end."""
    return jnp.where(slots < 0, jnp.int32(count), slots)


def read_states(pool: jax.Array, slots: Slots) -> jax.Array:
    """Return the states that sequences start from, [N, ...], out of a pool [slots, ...], in its type.

    Without `state_indices` the pool has one state for each sequence.
    """
    states = pool if slots.state_indices is None else read(pool, slots.state_indices)
    if slots.has_initial_state is None:
        return states
    # A freed slot may hold anything, so zeros are selected, because 0 times NaN is NaN.
    kept = slots.has_initial_state.reshape(-1, *(1,) * (states.ndim - 1))
    return jnp.where(kept, states, jnp.zeros((), states.dtype))


def write_states(pool: jax.Array, slots: Slots, states: jax.Array) -> jax.Array:
    """Return the pool with the states [N, ...] in their slots, or the states themselves if there is no pool."""
    return states if slots.state_indices is None else write(pool, slots.state_indices, states)
