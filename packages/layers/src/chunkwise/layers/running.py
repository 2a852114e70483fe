"""The parts around the mathematics of a layer: its caches, and the tokens over which it runs.

A layer is one function of its hidden states. It calls the methods `convolve` and `operate` of the object that it runs
over: `Sequences`, for training, prefill and decode, or `Serving`, for a step of a serving engine.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from chunkwise.causal_conv1d import causal_conv1d, causal_conv1d_update
from chunkwise.layers import config, division
from chunkwise.shared.call import arguments, checks
from chunkwise.shared.implementation import remat
from chunkwise.shared.kernels import chunking
from chunkwise.shared.mesh import context
from chunkwise.shared.plain import stream
from chunkwise.shared.serving import slot_rows, state_pool

# The names of the operator's implementations in the packages around it, and for decoding, which has no stages.
AROUND = {None: None, "xla": "xla", "staged": "pallas", "fused": "pallas"}
_DECODE = {None: None, "xla": "xla", "staged": None, "fused": "fused"}
_CONFIG = config.LayerConfig
# The name of products of hidden states with matrices, for jax.checkpoint.
_PROJECTED = "chunkwise_projected"

# The names that `jax.checkpoint` of a layer, or of a block with a layer, keeps: the products with matrices and the
# results of the operator's kernel, and if tokens are split, also the state that comes in, so that no device waits for
# others again. The backward repeats norms, gates and convolutions, which take little time and much memory.
_KEPT = (_PROJECTED, remat.RESIDUAL_NAME, context.MAP_NAME, context.STATE_NAME)
_keeps_these = jax.checkpoint_policies.save_only_these_names(*_KEPT)


def remat_policy(primitive: Any, *inputs: Any, **parameters: Any) -> Any:
    """Say which arrays of a layer `jax.checkpoint(block, policy=remat_policy)` keeps for the backward.

    It keeps the products of hidden states with matrices and the results of the operator's kernel, and where tokens are
    split over devices, the states that come in. The backward computes convolutions, gates and norms again. JAX calls it
    for every operation.
    """
    return _keeps_these(primitive, *inputs, **parameters)


def offload_policy() -> Callable[..., Any]:
    """Return a policy of `jax.checkpoint` that moves to the host's memory the arrays that `remat_policy` keeps.

    The backward brings them back. It works under jit, on devices with a memory of the kind "pinned_host".
    """
    return jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[], names_which_can_be_offloaded=list(_KEPT), offload_src="device",
        offload_dst="pinned_host",
    )  # fmt: skip


class Cache(NamedTuple):
    """What a layer remembers of N sequences, so that it can go on with their next tokens; or a pool of such memories.

    Attributes:
      conv: the last W - 1 inputs of the convolutions of queries, keys and values, [N, W - 1, channels] each; empty if
        the layer has no convolutions. They keep the type that they have in the cache, whatever the type of the hidden
        states, so a `lax.scan` can carry a cache. A layer without a cache returns them in the type of the hidden
        states.
      state: the state of the operator [N, HV, K, V], the `MlstmState` of mLSTM, or in a pool the StatePool of
        `empty_pool`.
    """

    conv: tuple[jax.Array, ...]
    state: Any


def empty_cache(config: config.LayerConfig, N: int, dtype=jnp.float32, state_dtype=jnp.float32) -> Cache:
    """Return the cache of N sequences without tokens, or a pool of N slots.

    Args:
      config: sizes of the layer.
      N: sequences or slots.
      dtype: the type of the inputs of the convolutions, which they keep. The type of the hidden states holds them
        exactly.
      state_dtype: the type of the states, float32, bfloat16 or float16, which they keep. Other types than float32
        round them after every call.
    """
    _CONFIG.check(config)
    return Cache(_no_inputs(config, N, dtype), config.empty_state(N, state_dtype))


def _no_inputs(config: config.LayerConfig, N: int, dtype) -> tuple[jax.Array, ...]:
    """Return the inputs of convolutions before the first token of N sequences: zeros."""
    return tuple(jnp.zeros((N, config.W - 1, channels), dtype) for channels in config.channels)


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

    Args:
      config: sizes of the layer.
      slots: slots of the pool.
      dtype: the type of the inputs of the convolutions.
      state_dtype: the type of the states, which may be int8.
      replay: tokens of the ring of a slot, 0 for no ring.
      decode_tokens: over a ring, the most tokens of a decode in any step: the convolutions keep their inputs after each
        of these tokens, [slots * decode_tokens, W - 1, channels].
    """
    _CONFIG.check(config)
    if not isinstance(config.state_letters, str):
        raise NotImplementedError(
            f"`config` must be of a layer whose state is one array, as the slots of a pool are; got "
            f"{type(config).__name__}."
        )
    state = state_pool.make_pool(
        slots, config.HV, config.K, config.V, state_dtype, replay=replay, H=config.H, per_channel=config.per_channel
    )
    return Cache(_no_inputs(config, slots * decode_tokens, dtype), state)


def read_cache(pool: Cache, slots: jax.Array, num_accepted_tokens: jax.Array | None = None) -> Cache:
    """Return the content of some slots of a pool as the cache of n sequences, in the form of `empty_cache`.

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
    wanted, have = len(pool.conv), len(cache.conv)
    checks.check(wanted == have, f"`cache.conv` must have {wanted} arrays, as `pool.conv` has; got {have}.")
    for i, (x, rows) in enumerate(zip(pool.conv, cache.conv, strict=True)):
        checks.check_array(f"cache.conv[{i}]", rows, "n W-1 C", (slots.shape[0], *x.shape[1:]))
    written = state_pool.write_states(state, slots, cache.state)
    places = arguments.Slots(conv_slots(pool, slots, jnp.int32(0)))
    conv = tuple(
        slot_rows.write_states(x, places, jnp.asarray(rows)) for x, rows in zip(pool.conv, cache.conv, strict=True)
    )
    return Cache(conv, written if state is pool.state else written.states)


def check_is_cache(name: str, cache) -> None:
    """Check that an argument is a Cache."""
    whole = hasattr(cache, "conv") and hasattr(cache, "state")
    checks.check(whole, f"`{name}` must be a Cache; got {type(cache).__name__}.")


def _check_pool(pool: Cache) -> tuple[Cache, state_pool.StatePool]:
    """Check a pool of a layer; return it with arrays of JAX, and return its states as a StatePool."""
    check_is_cache("pool", pool)
    if state_pool.as_pool(pool.state) is not pool.state:
        checks.check_array("pool.state", pool.state, "slots HV K V")
    pool = jax.tree.map(jnp.asarray, pool)
    check_conv_slots(pool)
    return pool, state_pool.as_pool(pool.state)


def _slots_each(pool: Cache) -> int:
    """Return U, how many slots convolutions have for a slot of the states: over a ring, the tokens of a decode."""
    return pool.conv[0].shape[0] // pool.state.shape[0] if state_pool.as_pool(pool.state).replay and pool.conv else 1


def check_conv_slots(pool: Cache, decode_tokens: int = 1) -> None:
    """Check that the convolutions of a pool have a slot for each token of a decode of each slot."""
    slots, U, ring = pool.state.shape[0], _slots_each(pool), state_pool.as_pool(pool.state).replay
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
    return jnp.where(exists, slots * jnp.int32(_slots_each(pool)) + token, jnp.int32(-1))


class Step(NamedTuple):
    """Which tokens of a serving step belong to which sequence, and where the state of a sequence is.

    The fields are arguments of `chunkwise.pipeline.ragged_gated_delta_rule`, which describes them. All layers of a
    model take the same Step.
    """

    cu_seqlens: jax.Array
    state_indices: jax.Array
    has_initial_state: jax.Array | None = None
    num_decodes: int | jax.Array = 0
    num_sequences: int | jax.Array | None = None
    read_indices: jax.Array | None = None
    num_accepted_tokens: jax.Array | None = None
    block_state_indices: jax.Array | None = None


# The normed output of a layer [B, T, HV, V], and the cache after its tokens.
Mixed = tuple[jax.Array, Cache]


class Operators(NamedTuple):
    """An operator in its three forms: over whole sequences, token by token, and over a serving step."""

    chunk: Callable
    recurrent: Callable
    ragged: Callable


@dataclass(frozen=True)
class Sequences:
    """Runs a layer over sequences, from a cache or from zeros; its fields are arguments of the layer."""

    cache: Cache | None
    output_cache: bool
    cu_seqlens: jax.Array | None
    segment_ids: jax.Array | None
    padding_id: int
    implementation: str | None
    sharding: arguments.Sharding | None
    context_axis: Any

    @property
    def own_cache(self) -> tuple[str, Cache | None]:
        """The name of the argument with the cache, and the cache."""
        return "cache", self.cache

    def num_states(self, B: int) -> int | None:
        """Return how many states a cache for B rows must have, one for every sequence."""
        checks.check_packed(self.cu_seqlens, B)
        return B if self.cu_seqlens is None else self.cu_seqlens.shape[0] - 1

    @property
    def _packing(self) -> dict:
        whole = isinstance(self.padding_id, int | np.integer) and not isinstance(self.padding_id, bool)
        checks.check(whole, f"`padding_id` must be a whole number; got {self.padding_id!r}.")
        ids = self.segment_ids
        checks.check_library("segment_ids", ids)
        if ids is not None and self.padding_id >= 0:
            ids = jnp.where(ids == self.padding_id, -1, ids)
        return dict(cu_seqlens=self.cu_seqlens, segment_ids=ids, context_axis=self.context_axis)

    def valid_tokens(self, x) -> jax.Array | None:
        """Return which tokens of x [B, T, D] are not padding, bool [1, T] or [B, T]; None if no token can be."""
        (B, T, _), ids, ends = x.shape, *map(checks.as_int32, (self._packing["segment_ids"], self.cu_seqlens))
        checks.check_packed(ends, B)
        checks.check_segment_ids(ids, B, T, ends)
        if ends is not None and self.context_axis is not None:
            ends = stream.local_boundaries(ends, T, self.context_axis)
        return chunking.valid_tokens(ends, ids, T)

    def _decodes(self, x) -> bool:
        """Return whether each row of x is one token."""
        return x.shape[1] == 1 and all(value is None for value in self._packing.values())

    def continues_by_one(self, x) -> bool:
        """Return whether each row of x is one token that follows a cache."""
        return self.cache is not None and self.output_cache and self._decodes(x)

    def convolve(self, i: int, x, weight, bias, heads: int):
        """Return convolution i with SiLU, of the channels x [B, T, C] of `heads` heads, and its cache."""
        before = None if self.cache is None else self.cache.conv[i]
        if before is not None and self.output_cache and self._decodes(x):
            return causal_conv1d_update(
                x, before, weight, bias, activation="silu", sharding=division.split_heads(self.sharding, heads)
            )
        return causal_conv1d(
            x, weight, bias, before, self.output_cache, activation="silu", **self._packing,
            implementation=AROUND[self.implementation], sharding=division.split_heads(self.sharding, heads),
        )  # fmt: skip

    def operate(self, operators: Operators, *arrays, **options):
        """Return the output of an operator [B, T, HV, V] and its final states."""
        operator, packing, implementation = operators.chunk, self._packing, self.implementation
        if self._decodes(arrays[0]):
            operator, packing, implementation = operators.recurrent, {}, _DECODE[implementation]
        before = None if self.cache is None else self.cache.state
        o, state = operator(
            *arrays, initial_state=before, output_final_state=self.output_cache, **options, **packing,
            implementation=implementation, sharding=self.sharding,
        )  # fmt: skip
        if before is None or state is None:
            return o, state
        return o, jax.tree.map(lambda after, before: after.astype(before.dtype), state, before)


@dataclass(frozen=True)
class Serving:
    """Runs a layer over a serving step, from and to a pool; its fields are arguments of the layer."""

    pool: Cache
    step: Step
    block_size: int | None
    decode_tokens: int | None
    implementation: str | None
    sharding: arguments.Sharding | None

    @property
    def own_cache(self) -> tuple[str, Cache | None]:
        """The name of the argument with the pool, and the pool."""
        return "pool", self.pool

    def num_states(self, B: int) -> int | None:
        """Return None: a pool has any number of slots."""
        return None

    @property
    def slots(self) -> dict:
        """The arguments of an operator that say which sequences the step has, and where their states are."""
        checks.check(isinstance(self.step, Step), f"`step` must be a Step; got {type(self.step).__name__}.")
        return self.step._asdict() | {"block_size": self.block_size}

    def valid_tokens(self, x) -> jax.Array | None:
        """Return which tokens of x [1, T, D] belong to a sequence that exists, bool [1, T]."""
        ends, count = checks.as_int32(self.slots["cu_seqlens"]), self.step.num_sequences
        if ends is None or count is None:
            return chunking.valid_tokens(ends, None, x.shape[1])
        exists = jnp.arange(ends.shape[0], dtype=jnp.int32) <= count
        return chunking.valid_tokens(jnp.max(jnp.where(exists, ends, jnp.int32(0)))[None], None, x.shape[1])

    @property
    def _conv_slots(self) -> dict:
        """The slots of the convolutions; over a ring, a decode writes a slot after each token."""
        given, pool = self.slots, state_pool.as_pool(self.pool.state)
        if not pool.replay:
            return given
        wide = functools.partial(conv_slots, self.pool)
        indices = jnp.asarray(given["state_indices"])
        source = indices if given["read_indices"] is None else jnp.asarray(given["read_indices"])
        given["read_indices"] = wide(source, state_pool.last_kept(pool, source, given["num_accepted_tokens"]))
        given["state_indices"] = wide(indices[:, None], jnp.arange(_slots_each(self.pool), dtype=jnp.int32)[None])
        given["num_accepted_tokens"] = None
        if given["block_state_indices"] is not None:
            given["block_state_indices"] = wide(jnp.asarray(given["block_state_indices"]), jnp.int32(0))
        return given

    def convolve(self, i: int, x, weight, bias, heads: int):
        """Return convolution i with SiLU, and its pool after the step."""
        return causal_conv1d_update(
            x, self.pool.conv[i], weight, bias, activation="silu", **self._conv_slots,
            implementation=AROUND[self.implementation], sharding=division.split_heads(self.sharding, heads),
        )  # fmt: skip

    def operate(self, operators: Operators, *arrays, **options):
        """Return the output of an operator [1, T, HV, V] and the pool of its states after the step."""
        return operators.ragged(
            *arrays, self.pool.state, **options, **self.slots, decode_tokens=self.decode_tokens,
            implementation=self.implementation, sharding=self.sharding,
        )  # fmt: skip


Run = Sequences | Serving


def by_head(x, heads: int):
    """Return channels [B, T, heads size] as [B, T, heads, size]."""
    return x.reshape(*x.shape[:2], heads, -1)


def with_bias(x: jax.Array, bias: jax.Array) -> jax.Array:
    """Return x [B, T, channels] plus a bias [channels] in the type of x."""
    return x + bias.astype(x.dtype)[None, None]


def convolve_heads(
    run: Run, config: config.LayerConfig, projected, weights, biases=None
) -> tuple[list[jax.Array], Any]:  # fmt: skip
    """Return silu of the convolutions of queries, keys and values by head, and their parts of the cache."""
    heads = (config.H, config.H, config.HV)
    biases = biases or (None,) * 3
    pairs = list(map(run.convolve, range(3), projected, weights, biases, heads))
    return [by_head(y, count) for (y, _), count in zip(pairs, heads, strict=True)], tuple(conv for _, conv in pairs)


def project(x, *factors):
    """Return x [B, T, D] times matrices, in the type of x, under the name by which `remat_policy` keeps it.

    A matrix may be a function of x, and of the sharding of its result, that returns the product.
    """
    for factor in factors:
        x = factor(x) if callable(factor) else x @ factor.astype(x.dtype)
    return checkpoint_name(x, _PROJECTED)


def project_out(o, weight, x):
    """Return o [B, T, HV, V] times a matrix [HV V, D], in the type of x [B, T, D] and split over devices as x is."""
    flat = o.reshape(*o.shape[:2], -1).astype(x.dtype)
    sharding = jax.typeof(x).sharding
    explicit = {"out_sharding": sharding} if any(entry is not None for entry in jax.typeof(flat).sharding.spec) else {}
    if callable(weight):
        return weight(flat, **explicit)
    return jnp.einsum("btc,cd->btd", flat, weight.astype(x.dtype), **explicit)
