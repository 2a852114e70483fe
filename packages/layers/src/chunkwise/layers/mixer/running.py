"""The parts around the mathematics of a layer: the tokens over which it runs, and its products.

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
from chunkwise.layers import caches
from chunkwise.layers.devices import division
from chunkwise.shared.call import arguments, checks
from chunkwise.shared.implementation import remat
from chunkwise.shared.kernels import chunking
from chunkwise.shared.kernels.spans import segment_tables
from chunkwise.shared.mesh import context, partition
from chunkwise.shared.plain import stream
from chunkwise.shared.serving import state_pool, step_table

# The names of the operator's implementations in the packages around it, and for decoding, which has no stages.
AROUND = {None: None, "xla": "xla", "staged": "pallas", "fused": "pallas"}
_DECODE = {None: None, "xla": "xla", "staged": None, "fused": "fused"}
# The name of products of hidden states with matrices, for jax.checkpoint.
_PROJECTED = "chunkwise_projected"
# The weights of a convolution that returns the older one of two tokens.
OLDER = np.array([1.0, 0.0], np.float32)

# The names that `jax.checkpoint` of a layer, or of a block with a layer, keeps: the products with matrices and the
# results of the operator's kernel, and if tokens are split, also the state that comes in, so that no device waits for
# others again. The backward repeats norms, gates and convolutions, which take little time and much memory.
_KEPT = (_PROJECTED, remat.RESIDUAL_NAME, context.MAP_NAME, context.STATE_NAME)
_keeps_these = jax.checkpoint_policies.save_only_these_names(*_KEPT)


def remat_policy(primitive: object, *inputs: object, **parameters: object) -> Any:
    """Say which arrays of a layer `jax.checkpoint(block, policy=remat_policy)` keeps for the backward.

    It keeps the products of hidden states with matrices and the results of the operator's kernel, and where tokens are
    split over devices, the states that come in. The backward computes convolutions, gates and norms again. JAX calls it
    for every operation.
    """
    return _keeps_these(primitive, *inputs, **parameters)


def offload_policy() -> Callable[..., Any]:
    """Return a policy of `jax.checkpoint` that moves to the host's memory the arrays that `remat_policy` keeps.

    The call is::

        block = jax.checkpoint(block, policy=offload_policy())

    The backward brings them back. It works under jit, on devices with a memory of the kind "pinned_host".
    """
    return jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[], names_which_can_be_offloaded=list(_KEPT), offload_src="device",
        offload_dst="pinned_host",
    )  # fmt: skip


class Step(NamedTuple):
    """Which tokens of a serving step belong to which sequence, and where the state of a sequence is.

    The fields are arguments of `chunkwise.pipeline.ragged_gated_delta_rule`, which describes them. All layers of a
    model take the same Step. For two sequences of 2 and 4 tokens, whose states are in slots 1 and 3 of a pool, it is::

        step = Step(jnp.array([0, 2, 6], jnp.int32), jnp.array([1, 3], jnp.int32))
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
Mixed = tuple[jax.Array, caches.Cache]
# The output of a convolution, and its inputs for the cache; None if the layer returns no cache.
Convolved = tuple[jax.Array, Any]


class Operators(NamedTuple):
    """An operator in its three forms: over whole sequences, token by token, and over a serving step."""

    chunk: Callable
    recurrent: Callable
    ragged: Callable


@dataclass(frozen=True)
class Sequences:
    """Runs a layer over sequences, from a cache or from zeros; its fields are arguments of the layer."""

    cache: caches.Cache | None
    output_cache: bool
    cu_seqlens: jax.Array | None
    segment_ids: jax.Array | None
    padding_id: int
    implementation: str | None
    sharding: checks.Sharding | None
    context_axis: str | tuple[str, ...] | None

    @property
    def own_cache(self) -> tuple[str, caches.Cache | None]:
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
        checks.check_flags(output_cache=self.output_cache)
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
        return stream.valid_tokens(ends, ids, T, self.context_axis)

    def _decodes(self, x) -> bool:
        """Return whether each row of x is one token."""
        return x.shape[1] == 1 and all(value is None for value in self._packing.values())

    def continues_by_one(self, x) -> bool:
        """Return whether each row of x is one token that follows a cache."""
        return self.cache is not None and self.output_cache and self._decodes(x)

    def convolve(self, i: int, x, weight, bias, heads: int, activation: str | None = "silu") -> Convolved:
        """Return convolution i, with SiLU, of the channels x [B, T, C] of `heads` heads, and its cache."""
        before = None if self.cache is None else self.cache.conv[i]
        if before is not None and self.output_cache and self._decodes(x):
            return causal_conv1d_update(
                x, before, weight, bias, activation=activation, sharding=division.split_heads(self.sharding, heads)
            )
        return causal_conv1d(
            x, weight, bias, before, self.output_cache, activation=activation, **self._packing,
            implementation=AROUND[self.implementation], sharding=division.split_heads(self.sharding, heads),
        )  # fmt: skip

    def positions(self, i: int, x) -> jax.Array:
        """Return how many tokens each token of x [B, T, D] follows, float32 [B or 1, T], with those before the cache.

        Part i of the cache counts the tokens before it, [N, 1, 1].
        """
        T, axes = x.shape[1], checks.check_context_axis(self.context_axis)
        token = stream.first_token(T, axes) + jnp.arange(T, dtype=jnp.int32)
        before = jnp.zeros((1, 1), jnp.float32) if self.cache is None else self.cache.conv[i][:, 0]
        if self.cu_seqlens is not None:
            ends = jnp.asarray(checks.as_int32(self.cu_seqlens))
            return _from_boundaries(token, ends, jnp.broadcast_to(before[:, 0], (ends.shape[0] - 1,)))[None]
        ids = self._packing["segment_ids"]
        if ids is None:
            return before + token[None].astype(jnp.float32)
        ids = jax.lax.all_gather(ids, axes, axis=1, tiled=True) if axes else partition.whole_rows(ids)
        begins, start = segment_tables.find_segments(ids).begins, segment_tables.runs(ids)[0]
        here = lambda y: jax.lax.dynamic_slice_in_dim(y, token[0], T, axis=1)
        later = segment_tables.scan_rows(jax.lax.cummax, jnp.maximum, begins.astype(jnp.int32)) > 0
        return jnp.where(here(later), 0.0, before) + (token[None] - here(start)).astype(jnp.float32)

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

    pool: caches.Cache
    step: Step
    block_size: int | None
    decode_tokens: int | None
    implementation: str | None
    sharding: checks.Sharding | None

    @property
    def own_cache(self) -> tuple[str, caches.Cache | None]:
        """The name of the argument with the pool, and the pool."""
        return "pool", self.pool

    def num_states(self, B: int) -> int | None:
        """Return None: a pool has any number of slots."""
        return None

    @property
    def slots(self) -> dict:
        """The arguments of an operator that say which sequences the step has, and where their states are."""
        checks.check(isinstance(self.step, Step), f"`step` must be a Step; got {type(self.step).__name__}.")
        for name in ("cu_seqlens", "state_indices"):
            checks.check(getattr(self.step, name) is not None, f"`step.{name}` must be an int32 array; got None.")
        return self.step._asdict() | {"block_size": self.block_size}

    def valid_tokens(self, x) -> jax.Array | None:
        """Return which tokens of x [1, T, D] belong to a sequence that exists, bool [1, T]."""
        return chunking.valid_tokens(self._boundaries(x), None, x.shape[1])

    def _boundaries(self, x) -> jax.Array:
        """Return the boundaries of the sequences that exist, int32 [N + 1], which rise within the tokens of x."""
        ends, count = checks.as_int32(self.slots["cu_seqlens"]), self.step.num_sequences
        checks.check_packed(ends, len(x))
        return step_table.boundaries_of(ends, arguments.Slots(num_sequences=count), x.shape[1])

    def positions(self, i: int, x) -> jax.Array:
        """Return how many tokens each token of x [1, T, D] follows, float32 [1, T], with those before the slot."""
        T, ends = x.shape[1], self._boundaries(x)
        older, _ = self.convolve(i, jnp.zeros((1, T, 1), jnp.float32), OLDER[None], None, 1, None)
        before = older[0, jnp.minimum(ends[:-1], T - 1), 0]
        return _from_boundaries(jnp.arange(T, dtype=jnp.int32), ends, before)[None]

    @property
    def _conv_slots(self) -> dict:
        """The slots of the convolutions; over a ring, a decode writes a slot after each token."""
        given, pool = self.slots, state_pool.as_pool(self.pool.state)
        if not pool.replay:
            return given
        wide = functools.partial(caches.conv_slots, self.pool)
        indices = jnp.asarray(given["state_indices"])
        source = indices if given["read_indices"] is None else jnp.asarray(given["read_indices"])
        given["read_indices"] = wide(source, state_pool.last_kept(pool, source, given["num_accepted_tokens"]))
        given["state_indices"] = wide(indices[:, None], jnp.arange(caches.slots_each(self.pool), dtype=jnp.int32)[None])
        given["num_accepted_tokens"] = None
        if given["block_state_indices"] is not None:
            given["block_state_indices"] = wide(jnp.asarray(given["block_state_indices"]), jnp.int32(0))
        return given

    def convolve(self, i: int, x, weight, bias, heads: int, activation: str | None = "silu") -> Convolved:
        """Return convolution i, with SiLU, and its pool after the step."""
        return causal_conv1d_update(
            x, self.pool.conv[i], weight, bias, activation=activation, **self._conv_slots,
            implementation=AROUND[self.implementation], sharding=division.split_heads(self.sharding, heads),
        )  # fmt: skip

    def operate(self, operators: Operators, *arrays, **options):
        """Return the output of an operator [1, T, HV, V] and the pool of its states after the step."""
        return operators.ragged(
            *arrays, self.pool.state, **options, **self.slots, decode_tokens=self.decode_tokens,
            implementation=self.implementation, sharding=self.sharding,
        )  # fmt: skip


Run = Sequences | Serving


def _from_boundaries(token: jax.Array, cu_seqlens: jax.Array, before: jax.Array) -> jax.Array:
    """Return, float32 [T], how many tokens of its sequence are before each token, given those of each sequence [N]."""
    owner = jnp.minimum(stream.document_of(token, cu_seqlens), cu_seqlens.shape[0] - 2)
    return before[owner] + (token - cu_seqlens[owner]).astype(jnp.float32)


def by_head(x, heads: int):
    """Return channels [B, T, heads size] as [B, T, heads, size]."""
    return x.reshape(*x.shape[:2], heads, -1)


def with_bias(x: jax.Array, bias: jax.Array | tuple[()]) -> jax.Array:
    """Return x [B, T, channels] plus a bias [channels] in the type of x; an empty tuple is no bias."""
    return x if isinstance(bias, tuple) else x + bias.astype(x.dtype)[None, None]


def convolve_heads(
    run: Run, heads: tuple[int, ...], projected, weights, biases=None
) -> tuple[list[jax.Array], Any]:  # fmt: skip
    """Return silu of the convolutions of projections by head, and their parts of the cache."""
    biases = biases or (None,) * len(heads)
    pairs = list(map(run.convolve, range(len(heads)), projected, weights, biases, heads))
    return [by_head(y, count) for (y, _), count in zip(pairs, heads, strict=True)], tuple(conv for _, conv in pairs)


def shift(run: Run, x) -> Convolved:
    """Return the hidden states of the token before each token of x [B, T, D], and their part of the cache.

    Before a sequence they are zeros. It is a convolution that reads only the older one of two tokens.
    """
    return run.convolve(0, x, jnp.broadcast_to(OLDER, (x.shape[2], 2)), None, 1, None)


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
