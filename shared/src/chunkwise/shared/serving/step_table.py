"""The table of a serving step, with tokens and slots made safe for any int32; and the possible faults of its values.

The first sequences decode: they have one token or a few. The others are prefills. Decodes and prefills start from slots
of a pool and end in slots of this pool. The number of decodes is traced, so that one program serves all steps.
"""

import functools
import itertools
import numbers
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from chunkwise.shared.call import checks
from chunkwise.shared.call.arguments import Slots
from chunkwise.shared.kernels import chunking, pools


class ServingStep(NamedTuple):
    """The routes of a serving step.

    Attributes:
      decodes: routes of the sequences that go token by token; other sequences have no tokens in these routes.
      prefills: routes of the sequences that go chunk by chunk; other sequences have no tokens in these routes.
      boundaries: int32 [N + 1], the boundaries of all sequences that exist.
      tokens: scalar int32, how many tokens the decodes have.
    """

    decodes: pools.Routes
    prefills: pools.Routes
    boundaries: jax.Array
    tokens: jax.Array


def find_step(
    cu_seqlens: jax.Array, slots: Slots, num_slots: int | None, num_tokens: int, decode_tokens: int | None = None
) -> ServingStep:
    """Return the routes of a step; sequences that do not exist have no tokens.

    A compiled program cannot refuse values of its arrays, and a kernel that read past the end of an array would halt
    its core. So tokens lie within the stream and slots within the pool for all values: a boundary below an earlier
    boundary becomes the earlier one, a boundary past the end becomes T, a decode has at most W tokens, and a slot past
    the end becomes -1, as does the slot of a number of accepted tokens that has no column in `state_indices`.

    Args:
      cu_seqlens, slots: the arguments of the step.
      num_slots: how many slots the pool has; None leaves slots as they are, so that they can be checked.
      num_tokens: T, how many tokens the stream has.
      decode_tokens: W for a pool with rings, where a decode has one slot; None without rings, where a decode has a slot
        for each of W tokens.
    """
    N = cu_seqlens.shape[0] - 1
    none, index = jnp.int32(-1), jnp.arange(N, dtype=jnp.int32)
    known = (lambda y: y) if num_slots is None else functools.partial(pools.existing, count=num_slots)
    indices: Any = slots.state_indices
    indices = known(indices[:, None] if indices.ndim == 1 else indices)
    columns = indices.shape[1]
    W = decode_tokens or columns
    sequences = N if slots.num_sequences is None else slots.num_sequences
    exists = index < sequences
    decodes = exists & (index < (0 if slots.num_decodes is None else slots.num_decodes))
    # Boundaries after the last sequence may be anything: they become the end of the last sequence.
    named = jnp.arange(N + 1, dtype=jnp.int32) <= sequences
    boundaries = chunking.rising(jnp.where(named, cu_seqlens, jnp.int32(0)), num_tokens)
    start, end = boundaries[:-1], boundaries[1:]
    tokens = jnp.max(jnp.where(decodes, end, jnp.int32(0)))
    source = slots.read_indices
    if source is not None:
        source = known(source)
    else:
        first = slots.num_accepted_tokens is None or decode_tokens is not None
        column = jnp.zeros(N, jnp.int32) if first else slots.num_accepted_tokens - 1
        chosen = column[:, None] == jnp.arange(columns, dtype=jnp.int32)[None]
        source = jnp.max(jnp.where(chosen, indices, none), axis=1)
    if slots.has_initial_state is not None:
        source = jnp.where(slots.has_initial_state, source, none)

    def routes(start, end, target, blocks=None):
        return pools.Routes(start, end, jnp.where(start < end, source, none), target, blocks)

    # The kernel for decodes gets as many tokens as decodes can have.
    room = min(num_tokens, N * W)
    first = jnp.minimum(start, room)
    stop = jnp.where(decodes, jnp.minimum(end, jnp.minimum(first + W, room)), first)
    reached = jnp.arange(columns, dtype=jnp.int32)[None] < (stop - first)[:, None]
    decoding = routes(first, stop, jnp.where(reached, indices, none))
    start, end = jnp.maximum(start, tokens), jnp.maximum(end, tokens)
    target = jnp.where(start < end, indices[:, 0], none)[:, None]
    blocks = None if slots.block_state_indices is None else known(slots.block_state_indices)
    return ServingStep(decoding, routes(start, end, target, blocks), boundaries, tokens)


def full_blocks(routes: pools.Routes, block_size: int) -> tuple[jax.Array, jax.Array]:
    """Return how many tokens there are at the end of each block, int32 [1, M], and slots [N, M], -1 if not full."""
    blocks: Any = routes.blocks
    # A number of tokens that an int32 cannot hold is past the end of every sequence.
    stop = np.minimum(np.arange(1, blocks.shape[1] + 1) * block_size, np.iinfo(np.int32).max)
    stop = jnp.asarray(stop[None], jnp.int32)
    return stop, jnp.where(stop <= (routes.end - routes.start)[:, None], blocks, jnp.int32(-1))


def find_faults(
    cu_seqlens: jax.Array,
    slots: Slots,
    num_slots: int,
    num_tokens: int,
    block_size: int | None,
    decode_tokens: int | None = None,
) -> list[checks.Fault]:
    """Return the possible faults of the values of a step, each with whether it is there."""
    slots, N = with_counts(slots), cu_seqlens.shape[0] - 1
    step = find_step(cu_seqlens, slots, None, num_tokens, decode_tokens)
    indices: Any = slots.state_indices
    W = decode_tokens or (1 if indices.ndim == 1 else indices.shape[1])
    given = (slots.num_decodes, 0), (slots.num_sequences, N)
    counts = (0, *(otherwise if x is None else x for x, otherwise in given), N)
    _, decodes, sequences, _ = counts
    exists = jnp.arange(N, dtype=jnp.int32) < sequences
    start, end = cu_seqlens[:-1], cu_seqlens[1:]
    accepted = jnp.ones(N, jnp.int32) if slots.num_accepted_tokens is None else slots.num_accepted_tokens
    # Every slot that is written, and the sequence that writes it.
    of = jnp.arange(N, dtype=jnp.int32)[:, None]
    written = [(step.decodes.target, of), (step.prefills.target, of)]
    if slots.block_state_indices is not None:
        assert block_size is not None
        written.append((full_blocks(step.prefills, block_size)[1], of))
    target, writer = (
        jnp.concatenate([y.reshape(-1) for y in each])
        for each in zip(*((x, jnp.broadcast_to(n, x.shape)) for x, n in written), strict=True)
    )
    source = jnp.maximum(step.decodes.source, step.prefills.source)
    kept, pairs = target >= 0, target[:, None] == target[None]
    twice = jnp.sum(pairs & kept[None], axis=1, dtype=jnp.int32) > 1
    crossed = (source[:, None] == target[None]) & kept[None] & (of != writer[None])
    return [
        checks.Fault(
            jnp.any(jnp.stack([jnp.asarray(a > b) for a, b in itertools.pairwise(counts)])),
            f"`num_decodes` must be at most `num_sequences`, and both from 0 to {N}.",
        ),
        checks.Fault(
            (cu_seqlens[0] != 0) | jnp.any(exists & ((start > end) | (end > num_tokens))),
            f"`cu_seqlens` must rise from 0 to at most T = {num_tokens}.",
        ),
        checks.Fault(
            jnp.any((of[:, 0] < decodes) & (end - start > W)),
            f"`num_decodes` must count sequences of at most {W} tokens.",
        ),
        checks.Fault(
            jnp.any(exists & ((accepted < 1) | (accepted > W))),
            f"`num_accepted_tokens` must be from 1 to {W}.",
        ),
        checks.Fault(
            jnp.any(source >= num_slots) | jnp.any(target >= num_slots),
            f"`state_indices` and the other indices must be below the number of slots {num_slots}.",
        ),
        checks.Fault(
            jnp.any(kept & twice), "`state_indices` must name a slot that is written only once; got one twice."
        ),
        checks.Fault(
            jnp.any(crossed),
            "`state_indices` must not name a slot that another sequence starts from; got one that is read and written.",
        ),
    ]


def with_counts(slots: Slots) -> Slots:
    """Return slots with num_decodes and num_sequences as arrays; None for 0 decodes and for all sequences."""
    decodes, sequences = slots.num_decodes, slots.num_sequences
    none = decodes is None or (isinstance(decodes, numbers.Integral) and decodes == 0)
    return slots._replace(
        num_decodes=None if none else jnp.asarray(decodes, jnp.int32),
        num_sequences=None if sequences is None else jnp.asarray(sequences, jnp.int32),
    )
