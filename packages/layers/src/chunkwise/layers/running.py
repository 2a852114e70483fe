"""What is around the mathematics of a layer: its caches, and over which tokens it runs.

A layer is one function of its hidden states, written once. It calls `convolve` and `operate` of what it runs over:
sequences, for training, prefill and decode, or a step of a serving engine.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from chunkwise.causal_conv1d import causal_conv1d, causal_conv1d_update
from chunkwise.layers import config, division
from chunkwise.shared.kernels import remat
from chunkwise.shared.operators import arguments, checks, context, state_pool

# What the packages around the operator call its implementations; and its decode step, which has no stages.
AROUND = {None: None, "xla": "xla", "staged": "pallas", "fused": "pallas"}
_DECODE = {None: None, "xla": "xla", "staged": None, "fused": "fused"}
_CONFIG = config.LayerConfig
# The name of what matrices make of hidden states, for jax.checkpoint.
_PROJECTED = "chunkwise_projected"

# What `jax.checkpoint` of a layer, or of a block with one, keeps: the products with matrices and what the operator's
# kernel makes; where tokens are split, also the state that comes in, so that no device waits for others again. The
# backward repeats what takes little time and much memory: norms, gates, convolutions.
_KEPT = (_PROJECTED, remat.RESIDUAL_NAME, context.MAP_NAME, context.STATE_NAME)
remat_policy = jax.checkpoint_policies.save_only_these_names(*_KEPT)


def offload_policy() -> Callable[..., Any]:
    """Return the policy of `jax.checkpoint` that moves to the memory of the host what `remat_policy` keeps.

    The backward brings it back. Under jit, on devices with a memory of the kind "pinned_host".
    """
    return jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[], names_which_can_be_offloaded=list(_KEPT), offload_src="device",
        offload_dst="pinned_host",
    )  # fmt: skip


class Cache(NamedTuple):
    """What the tokens so far leave to the next one, for N sequences; or a pool of it, with a slot in place of each.

    Attributes:
      conv: the last W - 1 inputs of the convolutions of queries, keys and values, [N, W - 1, channels] each; empty
        where the layer has none.
      state: the state of the operator [N, HV, K, V], or in a pool the StatePool of `empty_pool`.
    """

    conv: tuple[jax.Array, ...]
    state: Any


def empty_cache(config: config.LayerConfig, N: int, dtype=jnp.float32, state_dtype=jnp.float32) -> Cache:
    """Return the cache of N sequences that have no token yet, or a pool of N slots.

    Args:
      config: sizes of the layer.
      N: sequences or slots.
      dtype: of the inputs of the convolutions, that of the hidden states.
      state_dtype: of the states. `Cache.state` of a layer is always float32; a pool keeps its type.
    """
    _CONFIG.check(config)
    return Cache(_no_inputs(config, N, dtype), jnp.zeros((N, config.HV, config.K, config.V), state_dtype))


def _no_inputs(config: config.LayerConfig, N: int, dtype) -> tuple[jax.Array, ...]:
    """Return what the convolutions of N sequences have that have no token yet."""
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
      dtype: of the inputs of the convolutions.
      state_dtype: of the states, int8 too.
      replay: tokens of the ring of a slot, 0 for no ring.
      decode_tokens: over a ring, the most tokens of a decode, as the step will say it: the convolutions keep their
        inputs before each of them, [slots * decode_tokens, W - 1, channels].
    """
    _CONFIG.check(config)
    state = state_pool.make_pool(
        slots, config.HV, config.K, config.V, state_dtype, replay=replay, H=config.H, per_channel=config.per_channel
    )
    return Cache(_no_inputs(config, slots * decode_tokens, dtype), state)


class Step(NamedTuple):
    """Which tokens of a serving step belong to which sequence, and where its state is.

    These are arguments of `chunkwise.pipeline.ragged_gated_delta_rule` by their names, whose page says what they mean.
    All layers of a model take the same.
    """

    cu_seqlens: jax.Array
    state_indices: jax.Array
    has_initial_state: jax.Array | None = None
    num_decodes: int | jax.Array = 0
    num_sequences: int | jax.Array | None = None
    read_indices: jax.Array | None = None
    num_accepted_tokens: jax.Array | None = None
    block_state_indices: jax.Array | None = None


class Operators(NamedTuple):
    """An operator in its three forms: over whole sequences, token by token, and over a serving step."""

    chunk: Callable
    recurrent: Callable
    ragged: Callable


@dataclass(frozen=True)
class Sequences:
    """Runs a layer over sequences, from a cache or from zeros; arguments are those of the layer."""

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
        """What it starts from, after the name of the argument."""
        return "cache", self.cache

    def num_states(self, B: int) -> int | None:
        """Return how many sequences B rows hold, each of which has a state of its own in the cache; None for any."""
        checks.check_packed(self.cu_seqlens, B)
        return B if self.cu_seqlens is None else self.cu_seqlens.shape[0] - 1

    @property
    def _packing(self) -> dict:
        whole = isinstance(self.padding_id, int | np.integer) and not isinstance(self.padding_id, bool)
        checks.check(whole, f"`padding_id` must be a whole number; got {self.padding_id!r}.")
        ids = self.segment_ids
        if ids is not None and self.padding_id >= 0:
            ids = jnp.where(ids == self.padding_id, -1, ids)
        return dict(cu_seqlens=self.cu_seqlens, segment_ids=ids, context_axis=self.context_axis)

    def _decodes(self, x) -> bool:
        """Return whether each row of x is one token."""
        return x.shape[1] == 1 and all(value is None for value in self._packing.values())

    def convolve(self, i: int, x, weight, bias, heads: int):
        """Return the convolution of number i with SiLU, of the channels [B, T, C] of so many heads, and its cache."""
        before = None if self.cache is None else self.cache.conv[i]
        if before is not None and self.output_cache and self._decodes(x):
            return causal_conv1d_update(x, before, weight, bias, sharding=division.split_heads(self.sharding, heads))
        return causal_conv1d(
            x, weight, bias, before, self.output_cache, **self._packing, implementation=AROUND[self.implementation],
            sharding=division.split_heads(self.sharding, heads),
        )  # fmt: skip

    def operate(self, operators: Operators, *arrays, **options):
        """Return the output of an operator [B, T, HV, V] and its final states."""
        operator, packing, implementation = operators.chunk, self._packing, self.implementation
        if self._decodes(arrays[0]):
            operator, packing, implementation = operators.recurrent, {}, _DECODE[implementation]
        return operator(
            *arrays, initial_state=None if self.cache is None else self.cache.state,
            output_final_state=self.output_cache, **options, **packing, implementation=implementation,
            sharding=self.sharding,
        )  # fmt: skip


@dataclass(frozen=True)
class Serving:
    """Runs a layer over a serving step, from a pool and into it; arguments are those of the layer."""

    pool: Cache
    step: Step
    block_size: int | None
    decode_tokens: int | None
    implementation: str | None
    sharding: arguments.Sharding | None

    @property
    def own_cache(self) -> tuple[str, Cache | None]:
        """Do as `Sequences.own_cache` does."""
        return "pool", self.pool

    def num_states(self, B: int) -> int | None:
        """Do as `Sequences.num_states` does: a pool has any number of slots."""
        return None

    @property
    def _slots(self) -> dict:
        checks.check(isinstance(self.step, Step), f"`step` must be a Step; got {type(self.step).__name__}.")
        return self.step._asdict() | {"block_size": self.block_size}

    @property
    def _conv_slots(self) -> dict:
        """The slots of the convolutions: over a ring, the inputs before every token of a decode have one of their own.

        A slot of the states then has the slots slot * U to slot * U + U - 1, for decodes of at most U tokens.
        """
        given, pool = self._slots, self.pool.state
        if not state_pool.ring_tokens(pool):
            return given
        U = self.decode_tokens or 1
        wide = lambda slots, t: jnp.where(slots >= 0, slots * jnp.int32(U) + t, jnp.int32(-1))
        indices = jnp.asarray(given["state_indices"])
        source = indices if given["read_indices"] is None else jnp.asarray(given["read_indices"])
        given["read_indices"] = wide(source, state_pool.last_kept(pool, source, given["num_accepted_tokens"]))
        given["state_indices"] = wide(indices[:, None], jnp.arange(U, dtype=jnp.int32)[None])
        given["num_accepted_tokens"] = None
        if given["block_state_indices"] is not None:
            given["block_state_indices"] = wide(jnp.asarray(given["block_state_indices"]), jnp.int32(0))
        return given

    def convolve(self, i: int, x, weight, bias, heads: int):
        """Do as `Sequences.convolve` does."""
        return causal_conv1d_update(
            x, self.pool.conv[i], weight, bias, **self._conv_slots, implementation=AROUND[self.implementation],
            sharding=division.split_heads(self.sharding, heads),
        )  # fmt: skip

    def operate(self, operators: Operators, *arrays, **options):
        """Do as `Sequences.operate` does."""
        return operators.ragged(
            *arrays, self.pool.state, **options, **self._slots, decode_tokens=self.decode_tokens,
            implementation=self.implementation, sharding=self.sharding,
        )  # fmt: skip


Run = Sequences | Serving


def by_head(x, heads: int):
    """Return channels [B, T, heads size] as [B, T, heads, size]."""
    return x.reshape(*x.shape[:2], heads, -1)


def convolve_heads(
    run: Run, config: config.LayerConfig, projected, weights, biases=None
) -> tuple[list[jax.Array], Any]:  # fmt: skip
    """Return silu of the convolutions of queries, keys and values by head, and what they leave in the cache."""
    heads = (config.H, config.H, config.HV)
    biases = biases or (None,) * 3
    pairs = list(map(run.convolve, range(3), projected, weights, biases, heads))
    return [by_head(y, count) for (y, _), count in zip(pairs, heads, strict=True)], tuple(conv for _, conv in pairs)


def project(x, *factors):
    """Return x [B, T, D] times matrices, in the type of x, under a name by which `remat_policy` keeps it."""
    for factor in factors:
        x = x @ factor.astype(x.dtype)
    return checkpoint_name(x, _PROJECTED)


def project_out(o, weight, x):
    """Return o [B, T, HV, V] times a matrix [HV V, D], in the type of x [B, T, D] and split over devices as x is."""
    flat = o.reshape(*o.shape[:2], -1).astype(x.dtype)
    sharding = jax.typeof(x).sharding
    explicit = {"out_sharding": sharding} if any(entry is not None for entry in jax.typeof(flat).sharding.spec) else {}
    return jnp.einsum("btc,cd->btd", flat, weight.astype(x.dtype), **explicit)
