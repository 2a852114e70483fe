"""Pools of states that move fewer bytes than an array of states: states in 8 bits, and rings of tokens beside states.

Without a ring a decode reads and writes a state for every token. With a ring it reads the state S_0 that was written
last, the *checkpoint*, and the tokens since then, which are in the ring. G_t is the sum of the gates in nats since the
checkpoint, and d_i is the value that the i-th token of the ring wrote: v, or beta (v - S~^T k) in a delta rule with the
decayed state S~::

    S_t = Diag(e^{G_t}) S_0 + sum_{i<=t} (e^{G_t - G_i} k_i) d_i^T

A decode adds its k, d and gate to the ring, and writes no state until the ring is full. Then the ring is *folded*: S_t
becomes the checkpoint. A ring holds the gates themselves, not their sums, because a difference of two large sums is not
exact.
"""

import functools
from collections.abc import Iterator
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.layout import Format, Layout
from jax.sharding import SingleDeviceSharding

from chunkwise.shared.call import checks, faults
from chunkwise.shared.kernels import chunking
from chunkwise.shared.kernels.spans import pools
from chunkwise.shared.kernels.spans.operands import ABSENT
from chunkwise.shared.serving import slot_rows

DTYPES = (jnp.float32, jnp.bfloat16, jnp.float16, jnp.int8)
# The largest int8, to which the largest entry of a row is scaled.
_MOST = 127.0
# The smallest scale of a row. The scale and its inverse are normal numbers.
_LEAST_SCALE = 2.0**-120
# Where a token of the user is n tokens of a ring, `drafts` of a decode are n - 1 times this more than their number.
_MORE_TOKENS = 1 << 16


class StatePool(NamedTuple):
    """A pool of states, made by `make_pool`; a pytree of arrays whose first dimension is the slots.

    It is a named tuple, so libraries for checkpoints, such as flax.serialization and orbax, can save it. Donate it to
    the jitted serving step, which returns a pool of the same kind. HV = H R: value head n belongs to key head n // R.

    Attributes:
      states: the states that were written last [slots, HV, K, V], float32, bfloat16, float16 or int8. Where K and V are
        64, those of two heads fill the 128 lanes of a TPU without a ring or int8: [slots, HV / 2, 1, V, 2 K], where
        `shape` is as before.
      scales: float32 [slots, HV, K], the factors of the rows of int8 states; None for other types.
      keys: [slots, L, H, K], the keys of the tokens in the ring. Without a ring this and all fields below are None.
      writes: [slots, L, R, H, V], the values that the tokens in the ring wrote. Keys and writes are float32 in a
        float32 pool, and have 16 bits in other pools.
      gates: the log decays of these tokens in nats, float32 [slots, L, HV] in the order [R, H], or per channel
        [slots, L, R, H, K].
      count: int32 [slots], how many tokens the ring holds.
      drafts: int32 [slots], how many of these tokens the last decode added; `num_accepted_tokens` may keep fewer. After
        a decode of an operator of which a token takes n tokens of the ring it is (n - 1) 2**16 more.
    """

    states: jax.Array
    scales: jax.Array = ABSENT
    keys: jax.Array = ABSENT
    writes: jax.Array = ABSENT
    gates: jax.Array = ABSENT
    count: jax.Array = ABSENT
    drafts: jax.Array = ABSENT

    @property
    def replay(self) -> int:
        """L, the tokens that the ring of a slot can hold; 0 without a ring."""
        return 0 if self.keys is None else self.keys.shape[1]

    @property
    def is_array(self) -> bool:
        """Whether the pool is only an array of states, as kernels take it."""
        return self.scales is None and not self.replay and not self.paired

    @property
    def paired(self) -> bool:
        """Whether the states of two heads are one matrix."""
        return getattr(self.states, "ndim", 0) == 5

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the states of all heads, [slots, HV, K, V]."""
        if self.paired:
            slots, pairs, _, V, lanes = self.states.shape
            return slots, 2 * pairs, lanes // 2, V
        return tuple(self.states.shape)


# A pool of states in the form in which serving steps take and return it.
Pool = TypeVar("Pool", jax.Array, StatePool)


def as_pool(states: "jax.Array | StatePool") -> StatePool:
    """Return a pool: `states` itself, or a pool of the array `states`."""
    return states if isinstance(states, StatePool) else StatePool(states)


def make_pool(
    slots: int, HV: int, K: int, V: int, dtype=jnp.float32, *, replay: int = 0, H: int | None = None,
    per_channel: bool = False,
) -> StatePool:  # fmt: skip
    """Return a pool of zero states for the serving steps of an operator.

    The call is::

        states = make_pool(slots, HV, K, V, jnp.bfloat16, replay=16, H=H)

    Args:
      slots, HV, K, V: sizes of the states [slots, HV, K, V].
      dtype: the type of the states: float32, bfloat16, float16 or int8. An int8 state has a float32 scale for every
        row: the largest magnitude of the row over 127, found when the row is written; entries are rounded to nearest.
      replay: L, how many tokens the ring of a slot can hold; 0 for no ring.
      H: key heads, needed only for a ring; None for HV.
      per_channel: whether gates are per channel of the key, as in `ragged_kda`; needed only for a ring.

    Returns:
      A StatePool.

    Raises:
      ValueError: a size is not a whole number above 0, the type is not one of these, or H does not divide HV.
    """
    H = HV if H is None else H
    for name, size in dict(slots=slots, HV=HV, K=K, V=V, H=H).items():
        checks.check_size(name, size)
    fits = checks.is_whole(replay) and replay >= 0
    checks.check(fits, f"`replay` must be a number of tokens, or 0; got {checks.shown(replay)}.")
    most = checks.MOST_COUNTED
    checks.check(slots <= most, f"`slots` must be at most {most}, which int32 counts; got {slots}.")
    checks.check_heads(H, HV, "HV")
    checks.check_flags(per_channel=per_channel)
    dtype = checks.check_type("dtype", dtype, DTYPES)
    scales = jnp.zeros((slots, HV, K), jnp.float32) if dtype == jnp.int8 else ABSENT
    if not replay and dtype != jnp.int8 and pools.lies_in_pairs(HV, K, V):
        return StatePool(jnp.zeros((slots, HV // 2, 1, V, 2 * K), dtype))
    pool = StatePool(jnp.zeros((slots, HV, K, V), dtype), scales)
    if not replay:
        return pool
    R, ring = HV // H, ring_dtype(dtype)
    # No two leaves share a buffer, so that the pool can be donated.
    return pool._replace(
        keys=jnp.zeros((slots, replay, H, K), ring),
        writes=jnp.zeros((slots, replay, R, H, V), ring),
        gates=jnp.zeros((slots, replay, R, H, K) if per_channel else (slots, replay, HV), jnp.float32),
        count=jnp.zeros(slots, jnp.int32),
        drafts=jnp.zeros(slots, jnp.int32),
    )


def pool_formats(pool):
    """Return the Formats of a pool in rows, one for every array, for `jax.device_put` and `out_shardings` of `jax.jit`.

    The kernels take every array of a pool with its last dimension in rows; of states of Mamba-2, such as [128, 64],
    whose keys alone fill registers, the last but one. By default XLA lays out some arrays in another way on a TPU:
    states of a convolution, which have 3 rows a slot, among them. Then every serving step copies the whole array into
    rows and back, however few of its slots it needs::

        formats = pool_formats(pools)
        pools = jax.device_put(pools, formats)
        step = jax.jit(step, donate_argnums=0, out_shardings=(None, formats))
        o, pools = step(pools, ...)

    Args:
      pool: arrays of a pool, of the pools of a model, or their shapes, in any pytree.

    Returns:
      The same tree of Formats: rows, on the devices of the array, or for a shape without a sharding on the default one.
    """
    here = SingleDeviceSharding(jax.devices()[0])

    def format_of(x, states: bool = True):
        order = tuple(range(x.ndim))
        if states and x.ndim == 4 and pools.lies_transposed(*x.shape[2:]):
            order = 0, 1, 3, 2
        return Format(Layout(order), getattr(x, "sharding", None) or here)

    def formats_of(x):
        if not isinstance(x, StatePool):
            return format_of(x)
        # Over rings states lie in rows, too.
        others = jax.tree.map(functools.partial(format_of, states=False), x)
        return others if x.replay else others._replace(states=format_of(x.states))

    return jax.tree.map(formats_of, pool, is_leaf=lambda x: isinstance(x, StatePool))


def ring_dtype(dtype):
    """Return the type of the keys and writes in the ring of a pool whose states have this type."""
    return jnp.dtype(jnp.bfloat16 if dtype == jnp.int8 else dtype)


def check_pool(pool: StatePool, H: int, HV: int, K: int, V: int, per_channel: bool) -> None:
    """Check that the argument `states` is a pool of these sizes, as `make_pool` makes it."""
    slots = pool.states.shape[0] if getattr(pool.states, "ndim", 0) else 0
    checks.check(slots > 0, f"`states` must hold states [slots, HV, K, V]; got {checks.shown(pool.states)}.")
    checks.check_countable("states", (slots,), "slots")
    dtype = checks.check_type("states", pool.states.dtype, DTYPES)
    replay = 0 if pool.keys is None else (*getattr(pool.keys, "shape", ()), 0, 0)[1]
    make = functools.partial(make_pool, slots, HV, K, V, dtype, replay=replay, H=H, per_channel=per_channel)
    wanted = jax.eval_shape(make)
    for field, want, got in zip(StatePool._fields, wanted, pool, strict=True):
        rule = "None" if want is None else f"{want.dtype.name} {want.shape}"
        name = "array" if got is None or not hasattr(got, "dtype") else f"{got.dtype.name} {tuple(got.shape)}"
        fits = got is None if want is None else name == rule
        checks.check(fits, f"`states.{field}` must be {rule}; got {None if got is None else name}.")


def with_counts(pool: StatePool, target: jax.Array, count: jax.Array, drafts: jax.Array) -> StatePool:
    """Return the pool with new numbers of tokens in the rings of some slots."""
    put = chunking.put
    return pool._replace(count=put(pool.count, target, count), drafts=put(pool.drafts, target, drafts))


def with_plain_drafts(pool: StatePool) -> StatePool:
    """Return a pool with rings whose drafts are only numbers of tokens."""
    return pool._replace(drafts=pool.drafts & jnp.int32(_MORE_TOKENS - 1))


def with_tokens_of(pool: StatePool, before: StatePool, target: jax.Array, n: int) -> StatePool:
    """Return a pool after a step whose tokens took n tokens of a ring each, and which wrote the slots `target`."""
    more = jnp.where(pool.drafts > 0, jnp.int32((n - 1) * _MORE_TOKENS), jnp.int32(0))
    written = chunking.put(jnp.zeros_like(pool.drafts), target, jnp.ones_like(target)) > 0
    return pool._replace(drafts=jnp.where(written, pool.drafts + more, before.drafts))


def _tokens_each(pool: StatePool, slots: jax.Array) -> jax.Array:
    """Return how many tokens of the ring of each slot a token of its last decode took, int32 [n]."""
    return (chunking.take(pool.drafts, slots) >> _MORE_TOKENS.bit_length() - 1) + jnp.int32(1)


def quantize(states: jax.Array, axis: int = -1) -> tuple[jax.Array, jax.Array]:
    """Return float32 states [..., K, V] in the last 8 bits of int32 numbers, and the scales of rows [..., K, 1].

    `axis` is that of V in the states and of 1 in the scales.
    """
    most = jnp.max(jnp.abs(states), axis=axis, keepdims=True)
    scales = jnp.maximum(most * jnp.float32(1 / _MOST), jnp.float32(_LEAST_SCALE))
    # The last bits of a float32 number near 3 * 2**22 are a whole number, rounded to nearest.
    return lax.bitcast_convert_type(states * (1 / scales) + jnp.float32(3 * 2**22), jnp.int32), scales


def kept_tokens(pool: StatePool, source: jax.Array, accepted: jax.Array | None) -> jax.Array:
    """Return how many tokens of rings are kept, int32 [n]: all tokens except the rejected ones of the last decode."""
    count = jnp.clip(chunking.take(pool.count, source), 0, pool.replay)
    if accepted is None:
        return count
    drafts = jnp.clip(chunking.take(pool.drafts, source), 0, count)
    return count - drafts + jnp.clip(accepted, 0, drafts)


def last_kept(pool: StatePool, source: jax.Array, accepted: jax.Array | None) -> jax.Array:
    """Return the index in the last decode of the last token that is kept, int32 [n]; 0 after a prefill."""
    drafts = chunking.take(pool.drafts, source)
    return jnp.maximum(drafts if accepted is None else jnp.clip(accepted, 0, drafts), 1) - 1


def load(pool: StatePool, source: jax.Array, kept: jax.Array | None) -> jax.Array:
    """Return the states of slots, float32 [n, HV, K, V], after `kept` tokens of their rings; zeros for no slot."""
    states = slot_rows.read(pool.states, source).astype(jnp.float32)
    if pool.paired:
        _, HV, K, V = pool.shape
        return jnp.moveaxis(states.reshape(-1, HV // 2, V, 2, K), 2, 4).reshape(-1, HV, K, V)
    if pool.scales is not None:
        states = states * slot_rows.read(pool.scales, source)[..., None]
    if kept is None:
        return states
    keys, writes, gates = (slot_rows.read(x, source).astype(jnp.float32) for x in (pool.keys, pool.writes, pool.gates))
    n, L, R, H = writes.shape[:4]
    inside = jnp.arange(L, dtype=jnp.int32)[None] < kept[:, None]
    # A ring may hold anything after the kept tokens.
    keys, writes, gates = (jnp.where(inside.reshape(n, L, *(1,) * (x.ndim - 2)), x, 0.0) for x in (keys, writes, gates))
    gates = gates.reshape(n, L, R, H, -1)
    since = jnp.flip(jnp.cumsum(jnp.flip(gates, 1), axis=1), 1)  # of this token and all later ones
    after = jnp.concatenate([since[:, 1:], jnp.zeros_like(since[:, :1])], axis=1)
    by_head = lambda x: jnp.swapaxes(x, -3, -2)  # [..., R, H, D] to [..., H, R, D]
    products = jnp.einsum(
        "nlhrk,nlhrv->nhrkv", by_head(keys[:, :, None] * jnp.exp(after)), by_head(writes),
        precision=jax.lax.Precision.HIGHEST,
    )  # fmt: skip
    decay = by_head(jnp.exp(since[:, 0]))[..., None]  # [n, H, R, 1 or K, 1]
    return (decay * states.reshape(n, H, R, *states.shape[2:]) + products).reshape(states.shape)


def read(pool: StatePool, source: jax.Array, accepted: jax.Array | None) -> jax.Array:
    """Return the states that sequences of a serving step start from, float32 [n, HV, K, V]; zeros for no slot."""
    return load(pool, source, kept_tokens(pool, source, accepted) if pool.replay else None)


def store(pool: StatePool, target: jax.Array, states: jax.Array) -> StatePool:
    """Return the pool with float32 states [n, HV, K, V] in some slots, and with the rings of these slots empty."""
    if pool.scales is not None:
        states, scales = quantize(states)
        pool = pool._replace(scales=slot_rows.write(pool.scales, target, scales[..., 0]))
    if pool.paired:
        _, HV, K, V = pool.shape
        states = jnp.moveaxis(states.reshape(-1, HV // 2, 2, K, V), 4, 2).reshape(-1, *pool.states.shape[1:])
    pool = pool._replace(states=slot_rows.write(pool.states, target, states))
    if pool.count is None:
        return pool
    none = jnp.zeros(target.shape, jnp.int32)
    return with_counts(pool, target, none, none)


def _check_given(pool: StatePool, slots: jax.Array) -> tuple[StatePool, jax.Array]:
    """Check a pool and its slots; return them as JAX arrays and int32, because a pool from a file has numpy arrays."""
    checks.check(isinstance(pool, StatePool), f"`pool` must be a StatePool; got {type(pool).__name__}.")
    return jax.tree.map(jnp.asarray, pool), checks.check_array_of_slots("slots", slots)


def _check_accepted(pool: StatePool, slots: jax.Array, accepted: jax.Array) -> jax.Array:
    """Return numbers of accepted tokens of the last decode of some slots; their values are checked if all are known."""
    accepted = checks.check_array_of_slots("num_accepted_tokens", accepted)
    n, given = slots.shape[0], accepted.shape[0]
    checks.check(n == given, f"`num_accepted_tokens` must have a number for each of {n} `slots`; got {given}.")

    def find() -> Iterator[faults.Fault]:
        exists = pools.existing(slots, pool.shape[0]) >= 0
        drafts = exists.astype(jnp.int32)
        if pool.replay:
            drafts = chunking.take(with_plain_drafts(pool).drafts, slots) // _tokens_each(pool, slots)
        wrong = (drafts > 0) & ((accepted < 1) | (accepted > drafts))
        last = "the last decode of each slot had" if pool.replay else "a slot without a ring has"
        message = f"`num_accepted_tokens` must be from 1 to the tokens that {last}, {{most}}; got {{got}}."
        numbers = lambda: dict(most=[int(y) for y in drafts], got=[int(y) for y in accepted])
        yield faults.Fault(jnp.any(wrong), message, numbers)

    faults.check_known_values((*jax.tree.leaves(pool), slots, accepted), find)
    return accepted


def read_states(pool: StatePool, slots: jax.Array, num_accepted_tokens: jax.Array | None = None) -> jax.Array:
    """Return the states of some slots, float32 [n, HV, K, V], after the tokens of their rings that are kept.

    The call is::

        states = read_states(pool, slots)

    Args:
      pool: a StatePool.
      slots: int32 [n], traced; they may repeat. A slot that does not exist, such as a negative one, gives zeros.
      num_accepted_tokens: int32 [n], traced, as in a serving step: how many tokens of the last decode of each slot, as
        its operator counts them, are kept, at least 1; the others are rejected guesses. None keeps all. The number of
        a slot is not read if a prefill or `write_states` came last. Without a ring a slot has one state, so the number
        is 1 and any other number gives zeros: `slots` then names the slot of the state after the last accepted token.
        Numbers that do not fit raise an error outside of jit.
    """
    pool, slots = _check_given(pool, slots)
    if num_accepted_tokens is not None:
        num_accepted_tokens = _check_accepted(pool, slots, num_accepted_tokens)
        if pool.replay:
            num_accepted_tokens = jnp.clip(num_accepted_tokens, 0, pool.replay) * _tokens_each(pool, slots)
            pool = with_plain_drafts(pool)
    return load(pool, *kept_states(pool, slots, num_accepted_tokens))


def kept_states(pool: StatePool, slots: jax.Array, accepted: jax.Array | None) -> tuple[jax.Array, Any]:
    """Return the slots of the kept states, and how many tokens of their rings are kept, None without rings."""
    if pool.replay:
        return slots, kept_tokens(pool, slots, accepted)
    return slots if accepted is None else jnp.where(accepted == 1, slots, jnp.int32(-1)), None


def write_states(pool: StatePool, slots: jax.Array, states: jax.Array) -> StatePool:
    """Return the pool with new states in some slots, rounded to its type; the rings of these slots become empty.

    The call is::

        pool = write_states(pool, slots, states)

    Args:
      pool: a StatePool; donate it.
      slots: int32 [n], traced, all different, which is checked outside of jit. A slot that does not exist, such as a
        negative one, is not written.
      states: [n, HV, K, V], float32, bfloat16 or float16.
    """
    pool, slots = _check_given(pool, slots)
    checks.check_named_once("slots", slots, pool.shape[0])
    checks.check_array("states", states, "n HV K V", (slots.shape[0], *pool.shape[1:]))
    return store(pool, slots, states.astype(jnp.float32))
