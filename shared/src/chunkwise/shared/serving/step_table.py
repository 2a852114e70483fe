"""The table of a serving step, with tokens and slots made safe for any int32; and the possible faults of its values.

The first sequences decode: they have one token or a few. The others are prefills. Decodes and prefills start from slots
of a pool and end in slots of this pool. The number of decodes is traced, so that one program serves all steps.
"""

import functools
import numbers
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from chunkwise.shared.call import faults
from chunkwise.shared.call.arguments import Slots
from chunkwise.shared.kernels import chunking
from chunkwise.shared.kernels.spans import pools


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


def boundaries_of(cu_seqlens: jax.Array, slots: Slots, num_tokens: int) -> jax.Array:
    """Return the boundaries of the sequences of a step that exist, int32 [N + 1], which rise within its tokens.

    Boundaries after the last sequence may be anything: they become the end of the last sequence.
    """
    if slots.num_sequences is not None:
        named = jnp.arange(cu_seqlens.shape[0], dtype=jnp.int32) <= slots.num_sequences
        cu_seqlens = jnp.where(named, cu_seqlens, jnp.int32(0))
    return chunking.rising(cu_seqlens, num_tokens)


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
    indices = known(_by_column(slots))
    columns = indices.shape[1]
    W = decode_tokens or columns
    sequences = N if slots.num_sequences is None else slots.num_sequences
    exists = index < sequences
    decodes = exists & (index < (0 if slots.num_decodes is None else slots.num_decodes))
    boundaries = boundaries_of(cu_seqlens, slots, num_tokens)
    start, end = boundaries[:-1], boundaries[1:]
    tokens = jnp.max(jnp.where(decodes, end, jnp.int32(0)))
    # A decode over a ring has one slot, whose ring says which tokens are kept.
    accepted = None if decode_tokens is not None else slots.num_accepted_tokens
    source = known(first_slots(slots._replace(num_accepted_tokens=accepted)))
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


def _by_column(slots: Slots) -> jax.Array:
    """Return the slots of every sequence, int32 [N, W]."""
    indices = slots.state_indices
    return indices[:, None] if indices.ndim == 1 else indices


def first_slots(slots: Slots) -> jax.Array:
    """Return the slot that each sequence starts from, int32 [N], whether it exists or not; -1 for no such column."""
    if slots.read_indices is not None:
        return slots.read_indices
    indices = _by_column(slots)
    accepted = slots.num_accepted_tokens
    column = jnp.zeros(indices.shape[0], jnp.int32) if accepted is None else accepted - 1
    chosen = column[:, None] == jnp.arange(indices.shape[1], dtype=jnp.int32)[None]
    return jnp.max(jnp.where(chosen, indices, jnp.int32(-1)), axis=1)


def full_blocks(routes: pools.Routes, block_size: int) -> tuple[jax.Array, jax.Array]:
    """Return how many tokens there are at the end of each block, int32 [1, M], and slots [N, M], -1 if not full."""
    blocks: Any = routes.blocks
    # A number of tokens that an int32 cannot hold is past the end of every sequence.
    stop = np.minimum(np.arange(1, blocks.shape[1] + 1) * block_size, np.iinfo(np.int32).max)
    stop = jnp.asarray(stop[None], jnp.int32)
    return stop, jnp.where(stop <= (routes.end - routes.start)[:, None], blocks, jnp.int32(-1))


def find_faults(
    cu_seqlens: jax.Array, slots: Slots, num_slots: int, num_tokens: int, block_size: int | None,
    decode_tokens: int | None = None,
) -> list[faults.Fault]:  # fmt: skip
    """Return the possible faults of the values of a step, each with whether it is there."""
    slots, N = with_counts(slots), cu_seqlens.shape[0] - 1
    step = find_step(cu_seqlens, slots, None, num_tokens, decode_tokens)
    W = decode_tokens or _by_column(slots).shape[1]
    index = jnp.arange(N, dtype=jnp.int32)
    count = lambda value, otherwise: jnp.int32(otherwise) if value is None else value
    decodes, sequences = count(slots.num_decodes, 0), count(slots.num_sequences, N)
    exists, start, end = index < sequences, cu_seqlens[:-1], cu_seqlens[1:]
    falls = jnp.concatenate([cu_seqlens[:1] != 0, exists & ((start > end) | (end > num_tokens))])
    accepted = jnp.ones(N, jnp.int32) if slots.num_accepted_tokens is None else slots.num_accepted_tokens
    lengths = jnp.where(index < decodes, end - start, jnp.int32(0))
    return [
        faults.Fault(
            (decodes < 0) | (decodes > sequences) | (sequences > N),
            f"`num_decodes` must be at most `num_sequences`, and both from 0 to {N}; got {{decodes}} and "
            f"{{sequences}}.",
            functools.partial(dict, decodes=decodes, sequences=sequences),
        ),
        faults.fault(falls, cu_seqlens, f"`cu_seqlens` must rise from 0 to at most T = {num_tokens}"),
        faults.Fault(
            jnp.any(lengths > W),
            f"`num_decodes` must count sequences of at most {W} tokens, which come first; got {{decodes}}, and "
            f"sequence {{first}} has {{tokens}}.",
            lambda: dict(decodes=decodes, first=jnp.argmax(lengths > W), tokens=_at(lengths, jnp.argmax(lengths > W))),
        ),
        faults.fault(
            exists & ((accepted < 1) | (accepted > W)), accepted, f"`num_accepted_tokens` must be from 1 to {W}"
        ),
        *_faults_of_slots(step, slots, num_slots, block_size),
    ]


def _faults_of_slots(step: ServingStep, slots: Slots, num_slots: int, block_size: int | None) -> Iterator[faults.Fault]:
    """Yield the possible faults of the slots that sequences start from and write."""
    N = step.decodes.source.shape[0]
    source = jnp.maximum(step.decodes.source, step.prefills.source)
    # By argument: the slots of every sequence, [N, n].
    written = {"state_indices": jnp.concatenate([step.decodes.target, step.prefills.target], axis=1)}
    if slots.block_state_indices is not None:
        assert block_size is not None
        written["block_state_indices"] = full_blocks(step.prefills, block_size)[1]
    reads = "state_indices" if slots.read_indices is None else "read_indices"
    for name in dict.fromkeys((*written, reads)):
        used = [*([written[name]] if name in written else []), *([source[:, None]] if name == reads else [])]
        most = jnp.max(jnp.concatenate(used, axis=1), axis=1)
        past = most >= num_slots
        yield faults.Fault(
            jnp.any(past),
            f"`{name}` must be below {num_slots}, the number of slots; got {{slot}} for sequence {{first}}.",
            lambda past=past, most=most: dict(slot=_at(most, jnp.argmax(past)), first=jnp.argmax(past)),
        )
    # Every slot that is written, and the sequence that writes it.
    target = jnp.concatenate([x.reshape(-1) for x in written.values()])
    of = jnp.arange(N, dtype=jnp.int32)[:, None]
    writer = jnp.concatenate([jnp.broadcast_to(of, x.shape).reshape(-1) for x in written.values()])
    kept, after = target >= 0, jnp.arange(target.size)[None] > jnp.arange(target.size)[:, None]
    again = (target[:, None] == target[None]) & kept[None] & after
    names = " and ".join(f"`{name}`" for name in written)
    yield faults.Fault(
        jnp.any(again),
        f"{names} must name a slot that is written only once; got {{slot}} for sequence {{first}} and for sequence "
        f"{{then}}.",
        functools.partial(_pair, again, target, writer, writer),
    )
    crossed = (source[:, None] == target[None]) & kept[None] & (of != writer[None])
    yield faults.Fault(
        jnp.any(crossed),
        f"{names} must not name a slot that another sequence starts from; got {{slot}}, from which sequence {{first}} "
        f"starts and which sequence {{then}} writes.",
        functools.partial(_pair, crossed, target, of[:, 0], writer),
    )


def _pair(wrong: jax.Array, target: jax.Array, row: jax.Array, column: jax.Array) -> dict[str, jax.Array]:
    """Return the slot and the two sequences of the first wrong entry of a matrix."""
    i = jnp.argmax(jnp.any(wrong, axis=1))
    j = _at(jnp.argmax(wrong, axis=1), i)
    return dict(slot=_at(target, j), first=_at(row, i), then=_at(column, j))


def _at(y: jax.Array, i: jax.Array) -> jax.Array:
    """Return an entry of a vector; a reduction alone finds it, which runs on any mesh."""
    return jnp.sum(jnp.where(jnp.arange(y.size) == i, y, 0), dtype=y.dtype)


def with_counts(slots: Slots) -> Slots:
    """Return slots with num_decodes and num_sequences as arrays; None for 0 decodes and for all sequences."""
    decodes, sequences = slots.num_decodes, slots.num_sequences
    none = decodes is None or (isinstance(decodes, numbers.Integral) and decodes == 0)
    return slots._replace(
        num_decodes=None if none else jnp.asarray(decodes, jnp.int32),
        num_sequences=None if sequences is None else jnp.asarray(sequences, jnp.int32),
    )
