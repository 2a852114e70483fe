"""What a layer remembers of sequences: caches of their tokens so far, and pools of caches for serving."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from chunkwise.layers import config
from chunkwise.shared.call import arguments, checks
from chunkwise.shared.serving import slot_rows, state_pool

_CONFIG = config.LayerConfig


class Cache(NamedTuple):
    """What a layer remembers of N sequences, so that it can go on with their next tokens; or a pool of such memories.

    Attributes:
      conv: the last W - 1 inputs of the convolutions of queries, keys and values, [N, W - 1, channels] each; empty if
        the layer has no convolutions. RWKV-7 has the hidden states of the last token here, [N, 1, D], and lightning
        attention with rotary positions the count of tokens, float32 [N, 1, 1]. They keep the type that they have in the
        cache, whatever the type of the hidden states, so a `lax.scan` can carry a cache. A layer without a cache
        returns them in the type of the hidden states.
      state: the state of the operator [N, HV, K, V], the `MlstmState` of mLSTM, or in a pool the StatePool of
        `empty_pool`.
    """

    conv: tuple[jax.Array, ...]
    state: Any


def empty_cache(config: config.LayerConfig, N: int, dtype=jnp.float32, state_dtype=jnp.float32) -> Cache:
    """Return the cache of N sequences without tokens, or a pool of N slots.

    The call is::

        cache = empty_cache(config, N=2, dtype=jnp.bfloat16)

    Args:
      config: sizes of the layer.
      N: sequences or slots.
      dtype: the type of the inputs of the convolutions, float32, bfloat16 or float16, which they keep. The type of the
        hidden states holds them exactly.
      state_dtype: the type of the states, float32, bfloat16 or float16, which they keep. Other types than float32
        round them after every call.

    Raises:
      ValueError: N is not a whole number above 0, or a type is not one of these.
    """
    _CONFIG.check(config)
    checks.check_size("N", N)
    checks.check_type("state_dtype", state_dtype)
    return Cache(_no_inputs(config, N, dtype), config.empty_state(N, state_dtype))


def _no_inputs(config: config.LayerConfig, N: int, dtype) -> tuple[jax.Array, ...]:
    """Return the inputs of convolutions before the first token of N sequences: zeros."""
    kind = checks.check_type("dtype", dtype)
    kind = kind if config.conv_dtype is None else config.conv_dtype
    return tuple(jnp.zeros((N, config.W - 1, channels), kind) for channels in config.channels)


def empty_pool(
    config: config.LayerConfig,
    slots: int,
    dtype=jnp.float32,
    state_dtype=jnp.float32,
    *,
    replay: int = 0,
    decode_tokens: int = 1,
) -> Cache:
    """Return a pool whose states may be in 8 bits, and may have a ring of tokens: see `chunkwise.pipeline.make_pool`.

    The call is::

        pool = empty_pool(config, slots=64, dtype=jnp.bfloat16, state_dtype=jnp.int8, replay=16)

    Args:
      config: sizes of the layer. Of heads with K = V = 64, which lie in pairs, every device of a mesh must have an even
        number; a pool of `empty_cache` may have any.
      slots: slots of the pool.
      dtype: the type of the inputs of the convolutions.
      state_dtype: the type of the states, which may be int8.
      replay: tokens of the ring of a slot, 0 for no ring. `gated_delta_product` and `rwkv7_attention` take no ring.
      decode_tokens: over a ring, the most tokens of a decode in any step: the convolutions keep their inputs after each
        of these tokens, [slots * decode_tokens, W - 1, channels].

    Raises:
      ValueError: a number is not a whole number above 0, or a type is not one of these.
      NotImplementedError: the state of the layer is not one array, or the layer takes no ring.
    """
    _CONFIG.check(config)
    if not isinstance(config.state_letters, str):
        raise NotImplementedError(
            f"`config` must be of a layer whose state is one array, as the slots of a pool are; got "
            f"{type(config).__name__}."
        )
    check_ring(config, replay)
    checks.check_type("state_dtype", state_dtype, state_pool.DTYPES)
    checks.check_size("decode_tokens", decode_tokens)
    state = state_pool.make_pool(
        slots, config.HV, config.K, config.V, state_dtype, replay=replay, H=config.H, per_channel=config.per_channel
    )
    return Cache(_no_inputs(config, slots * decode_tokens, dtype), state)


def check_ring(config: config.LayerConfig, replay: int) -> None:
    """Check that a pool of a layer may have a ring of so many tokens."""
    if replay and not config.rings:
        raise NotImplementedError(
            f"`replay` must be 0 for a layer of which a token is several tokens of its operator, as that of "
            f"{type(config).__name__} is; got {replay}."
        )


def read_cache(pool: Cache, slots: jax.Array, num_accepted_tokens: jax.Array | None = None) -> Cache:
    """Return the content of some slots of a pool as the cache of n sequences, in the form of `empty_cache`.

    The call is::

        cache = read_cache(pool, slots)

    This is for requests that move to another pool or machine, and for prefix caches. `write_cache` puts the cache into
    any pool of the same layer, and the layer itself takes it as `cache`.

    Args:
      pool: a pool of `empty_pool`, with a ring or without, or of `empty_cache`.
      slots: int32 [n], traced; they may repeat. A slot that does not exist, such as a negative one, gives zeros.
      num_accepted_tokens: int32 [n], traced: how many tokens of the last decode of each slot are kept, at least 1, as
        in a serving step; the others are rejected guesses. None keeps all. It is not read for a slot that a prefill or
        `write_cache` wrote last. Without a ring the number is 1, and `slots` name the slot of the state after the last
        accepted token.

    Returns:
      The states, float32 [n, HV, K, V], with the tokens of their rings, and the inputs of the convolutions before the
      next token, [n, W - 1, channels] each, in the type of the pool.

    Raises:
      ValueError: an argument has the wrong shape or type; outside of jit also a number of tokens that does not fit.
    """
    pool, state = _check_pool(pool)
    slots, accepted = checks.check_array_of_slots("slots", slots), checks.as_int32(num_accepted_tokens)
    states = state_pool.read_states(state, slots, accepted)
    kept, _ = state_pool.kept_states(state, slots, accepted)
    last = state_pool.last_kept(state, slots, accepted) if state.replay else jnp.int32(0)
    places = arguments.Slots(conv_slots(pool, kept, last))
    return Cache(tuple(slot_rows.read_states(x, places) for x in pool.conv), states)


def write_cache(pool: Cache, slots: jax.Array, cache: Cache) -> Cache:
    """Return a pool with the cache of n sequences in some of its slots; the rings of these slots are empty.

    The call is::

        pool = write_cache(pool, slots, cache)

    Args:
      pool: a pool of `empty_pool`, of any type, with a ring or without, or of `empty_cache`; donate it.
      slots: int32 [n], traced, all different, which is checked outside of jit. A slot that does not exist, such as a
        negative one, is not written.
      cache: the cache of n sequences, from `read_cache` or from the layer; its arrays may be numpy's. States and inputs
        are rounded to the types of the pool.

    Raises:
      ValueError: an argument has the wrong shape or type.
    """
    pool, state = _check_pool(pool)
    slots = checks.check_array_of_slots("slots", slots)
    check_is_cache("cache", cache)
    checks.check_array("cache.state", cache.state, "n HV K V", (slots.shape[0], *state.shape[1:]))
    check_conv("cache.conv", cache.conv, [(slots.shape[0], *x.shape[1:]) for x in pool.conv])
    written = state_pool.write_states(state, slots, cache.state)
    places = arguments.Slots(conv_slots(pool, slots, jnp.int32(0)))
    conv = tuple(
        slot_rows.write_states(x, places, jnp.asarray(rows)) for x, rows in zip(pool.conv, cache.conv, strict=True)
    )
    return Cache(conv, written if state is pool.state else written.states)


def check_is_cache(name: str, cache) -> Cache:
    """Check that an argument is a Cache, and return it."""
    whole = hasattr(cache, "conv") and hasattr(cache, "state")
    checks.check(whole, f"`{name}` must be a Cache; got {type(cache).__name__}.")
    return cache


def check_conv(name: str, conv: Sequence[jax.Array], shapes: Sequence[tuple[int | None, ...]]) -> None:
    """Check the number and the shapes of the inputs of convolutions."""
    wanted, have = len(shapes), len(conv)
    checks.check(wanted == have, f"`{name}` must have {wanted} arrays; got {have}.")
    for i, (x, shape) in enumerate(zip(conv, shapes, strict=True)):
        checks.check_array(f"{name}[{i}]", x, "N W-1 C", shape)


def _check_pool(pool: Cache) -> tuple[Cache, state_pool.StatePool]:
    """Check a pool of a layer; return it with arrays of JAX, and return its states as a StatePool."""
    check_is_cache("pool", pool)
    if state_pool.as_pool(pool.state) is not pool.state:
        checks.check_array("pool.state", pool.state, "slots HV K V")
    pool = jax.tree.map(jnp.asarray, pool)
    check_conv_slots(pool)
    return pool, state_pool.as_pool(pool.state)


def slots_each(pool: Cache) -> int:
    """Return U, how many slots convolutions have for a slot of the states: over a ring, the tokens of a decode."""
    return pool.conv[0].shape[0] // pool.state.shape[0] if state_pool.as_pool(pool.state).replay and pool.conv else 1


def check_conv_slots(pool: Cache, decode_tokens: int = 1) -> None:
    """Check that the convolutions of a pool have a slot for each token of a decode of each slot."""
    slots, U, ring = pool.state.shape[0], slots_each(pool), state_pool.as_pool(pool.state).replay
    for i, conv in enumerate(pool.conv):
        rows = conv.shape[0]
        fits = rows == slots * max(U, 1) if ring else rows >= slots
        checks.check(fits, f"`pool.conv[{i}]` must have {slots} slots times `decode_tokens`; got {rows}.")
    checks.check(
        not pool.conv or decode_tokens <= U,
        f"`decode_tokens` must be at most {U}, the number that `empty_pool` made `pool` for; got {decode_tokens}.",
    )


def conv_slots(pool: Cache, slots, token) -> jax.Array:
    """Return the slots of the convolutions that have the inputs after a token of the last decode.

    Over a ring, the inputs after every token of a decode have a slot of their pool: to a slot of the states belong the
    slots slot * U to slot * U + U - 1, for decodes of at most U tokens, and a prefill leaves its inputs in the first of
    these.

    Args:
      pool: a pool of a layer.
      slots: int32, slots of the states.
      token: int32, the number of the token in its decode, from 0; without a ring 0.
    """
    exists = (slots >= 0) & (slots < pool.state.shape[0])
    return jnp.where(exists, slots * jnp.int32(slots_each(pool)) + token, jnp.int32(-1))
