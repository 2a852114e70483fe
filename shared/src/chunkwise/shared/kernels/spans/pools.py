"""Pools of states: which slot a sequence starts from and ends in, and how a kernel reads and writes the slots in place.

The index maps of the grid name the block of a slot, so that Pallas copies it to fast memory one grid step ahead. A
block that is written goes back when the index changes. So a grid step that neither reads nor writes a state keeps the
index of a grid step that does: see `resident`.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from chunkwise.shared import tuning
from chunkwise.shared.kernels import chunking, packed


class Routes(NamedTuple):
    """Which tokens the sequences of a stream have, and where their states lie in a pool; a slot below 0 is none.

    Kernels do not check the routes: tokens must lie within the stream, and slots within the pool.

    Attributes:
      start, end: int32 [N], the tokens of the sequence; both rise with n, and a sequence may be empty.
      source: int32 [N], the slot of the state that the sequence starts from; without a slot it starts from zeros.
      target: int32 [N, W], the slot of the state after token t of the sequence, or with W = 1 after its last token;
        without a slot the state is dropped. A sequence of fewer than W tokens has slots below 0 after them.
      blocks: int32 [N, M], the slot of the state after every block of tokens of the sequence, or None.
    """

    start: jax.Array
    end: jax.Array
    source: jax.Array
    target: jax.Array
    blocks: jax.Array | None = None


def lies_transposed(K: int, V: int) -> bool:
    """Return whether the states [K, V] of a pool lie in HBM as [V, K], and kernels take them so.

    XLA lays an array out with the dimension last that fills whole registers of 128 lanes, if there is one. States of
    128 and 64 channels would otherwise take twice their bytes, and a launch would copy the pool there and back.
    """
    return K % 128 == 0 and V % 128 != 0 and V % 16 == 0


def lies_in_pairs(HV: int, K: int, V: int) -> bool:
    """Return whether the states of two heads lie side by side in the lanes of a pool, as [V, 2 K].

    Alone they would take twice their bytes.
    """
    return HV % 2 == 0 and K == V == 64


def as_they_lie(pool: jax.Array) -> jax.Array:
    """Return a pool [slots, HV, K, V] as kernels take it: itself, or [slots, HV, 1, V, K] where states lie transposed.

    XLA moves no data for it.
    """
    return jnp.swapaxes(pool, 2, 3)[:, :, None] if lies_transposed(*pool.shape[2:]) else pool


def as_users_see(pool: jax.Array) -> jax.Array:
    """Return the pool [slots, HV, K, V] of a pool that `as_they_lie` returned."""
    return pool if pool.ndim == 4 else jnp.swapaxes(pool[:, :, 0], 2, 3)


def existing(slots: jax.Array, count: int) -> jax.Array:
    """Return slots of a pool of `count` slots, with -1 for slots that are negative or past the end."""
    return jnp.where((slots >= 0) & (slots < count), slots, jnp.int32(-1))


def start(copy) -> None:
    """Start a copy; `start` and `wait` are arguments of functions that go through many copies."""
    copy.start()


def wait(copy) -> None:
    """Wait for a copy that `start` started."""
    copy.wait()


def resident(slots: jax.Array, otherwise: jax.Array) -> jax.Array:
    """Return, int32 [S], the slot whose block a grid step holds in fast memory.

    A grid step holds its slot if it has one (`slots` is not below 0). Any other grid step holds the slot of the nearest
    earlier one that has a slot; the grid steps before the first one with a slot hold this slot. If no grid step has a
    slot, all hold `otherwise`.
    """
    index, has = jnp.arange(slots.shape[0], dtype=jnp.int32), slots >= 0
    before = jnp.where(has[None] & (index[None] <= index[:, None]), index[None], jnp.int32(-1))  # [S, S]
    before = jnp.max(before, axis=1)
    first = jnp.min(jnp.where(has, index, jnp.int32(slots.shape[0])))
    return jnp.where(first < slots.shape[0], chunking.take(slots, jnp.where(before < 0, first, before)), otherwise)


def resident_slots(source: jax.Array, target: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the slots whose blocks steps hold, to read and to write; they read `source` [R] and write `target` [S].

    If no step writes, all hold the slot that the first step reads, and `copy_through` writes it as it is.
    """
    source = resident(source, jnp.int32(0))
    return source, resident(target, source[0])


def copy_through(pool_ref, after_ref) -> None:
    """Copy the block that is read to the block that is written, which the caller found to be of the same slot.

    It is for the first step: if no step writes the block, the slot gets back what it had; if a step writes it, no harm
    is done.
    """
    after_ref[...] = pool_ref[...]


def fetch_states(pool_ref, state_ref, continues: jax.Array, transposed: bool = False) -> None:
    """Load the states of a slot as float32; if `continues` is 0, load zeros, whatever the slot holds.

    Args:
      pool_ref: the block of a pool of `as_they_lie`, [heads, K, V] or [heads, 1, V, K].
      state_ref: float32 [heads, K, V], or [heads / m, V, m K] if `transposed`, all dimensions padded with zeros.
      continues: scalar int32.
      transposed: whether the kernel holds states transposed, m heads side by side.
    """
    m, flipped, size = _orders(pool_ref, state_ref, transposed)
    if size != (state_ref.shape[1], state_ref.shape[2] // m):
        state_ref[...] = jnp.zeros_like(state_ref)

    def fetch(tile):
        states = [pool_ref[_at(pool_ref, head)].astype(jnp.float32) for head in _heads(tile, m)]
        # A slot that was freed may hold anything, so zeros are selected: 0 times NaN is NaN.
        x = jnp.where(continues == 1, _below(states, state_ref.shape[2] // m), 0.0)
        state_ref[tile, : size[0], : size[1] if m == 1 else None] = x.T if flipped else x

    _each_head(state_ref.shape[0], fetch)


def _orders(pool_ref, state_ref, transposed: bool) -> tuple[int, bool, tuple[int, ...]]:
    """Return how many heads the kernel holds side by side, whether in another order than the pool, and their size."""
    flipped, size = transposed != (len(pool_ref.shape) == 4), pool_ref.shape[-2:]
    return pool_ref.shape[0] // state_ref.shape[0], flipped, size[::-1] if flipped else size


def _at(pool_ref, head) -> tuple:
    """Return the place of the state of a head in the block of a pool."""
    return (head,) if len(pool_ref.shape) == 3 else (head, 0)


def _heads(tile, m: int) -> list:
    """Return the heads of a tile."""
    return [tile] if m == 1 else [tile * jnp.int32(m) + jnp.int32(j) for j in range(m)]


def _below(states: list[jax.Array], rows: int) -> jax.Array:
    """Return states below one another, with zeros between them where one has fewer rows than `rows`."""
    return jnp.concatenate([packed.whole(x, 0, rows) for x in states]) if len(states) > 1 else states[0]


def _each_head(heads: int, run) -> None:
    """Run a function for every head, some heads in a row, so that one transposition begins before another ends."""
    some = tuning.largest_divisor(heads, 8)

    def some_heads(i, _):
        for n in range(some):
            run(i * jnp.int32(some) + jnp.int32(n))

    lax.fori_loop(jnp.int32(0), jnp.int32(heads // some), some_heads, None)


def put_states(state_ref, pool_ref, transposed: bool = False) -> None:
    """Store states in a slot, in the type of the pool: the inverse of `fetch_states`."""
    m, flipped, size = _orders(pool_ref, state_ref, transposed)

    def put(tile):
        x = state_ref[tile, : size[0], : size[1] if m == 1 else None]
        x = (x.T if flipped else x).astype(pool_ref.dtype)
        for j, head in enumerate(_heads(tile, m)):
            first = j * state_ref.shape[2] // m
            pool_ref[_at(pool_ref, head)] = x if m == 1 else x[first : first + size[1]]

    _each_head(state_ref.shape[0], put)
