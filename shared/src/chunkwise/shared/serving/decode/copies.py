"""The copies of slots of the kernel that decodes, between the pools in HBM and its buffers."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from chunkwise.shared.kernels.spans import pools
from chunkwise.shared.serving.decode import table
from chunkwise.shared.serving.decode.records import DecodeStatic
from chunkwise.shared.serving.decode.refs import DecodeRefs

# How many buffers the grid steps take in turn.
BUFFERS = 2


def copy_counts(refs: DecodeRefs, out: bool = False) -> None:
    """Copy the numbers of tokens of all rings to scalar memory, or with `out` back."""
    pairs = (refs.pools.count, refs.buffers.counts), (refs.pools.drafts, refs.buffers.drafts_of)
    copies = [pltpu.make_async_copy(*(ends[::-1] if out else ends), refs.buffers.counting) for ends in pairs]
    for act in (pools.start, pools.wait):
        for copy in copies:
            act(copy)


def buffer_of(i) -> jax.Array:
    """Return the buffer of grid step i."""
    return jnp.bitwise_and(i, jnp.int32(BUFFERS - 1))


def copy_slots(
    refs: DecodeRefs, s: DecodeStatic, i, act, *only: str, out: bool = False, turn: jax.Array | int = 0
) -> None:
    """Start, or wait for, the copies of the slots that grid step i reads, or with `out` of those that it writes.

    With `only` they are the copies of some kinds: "conv", "states", or of rings "keys", "writes" and "gates". Where a
    loop takes the tokens of a decode, they are copies of the states after token `turn`.
    """
    b, semaphores = buffer_of(i), refs.buffers.stores if out else refs.buffers.reads
    # Numbers are read here, because a read under a condition takes longer.
    places = table.of_step(refs, table.PLACE, i) if refs.has_rings else None
    convs = table.of_step(refs, table.CONV, i) if refs.has_rings and s.decode_tokens > 1 else None

    def copy(n, slot, *token):
        place, conv = (slot if x is None else x[n] for x in (places, convs))

        def move(kind):
            for pool, buffer, *more in _ends(refs, s, kind, slot, place, conv, out):
                ends = pool, buffer.at[(b, jnp.int32(n), *token, *more)]
                act(pltpu.make_async_copy(*(ends[::-1] if out else ends), semaphores.at[b]))

        @pl.when(slot >= 0)
        def _():
            for kind in only or refs.kinds:
                if kind == "states" and out and refs.has_rings:
                    pl.when(place < 0)(functools.partial(move, "states"))
                else:
                    move(kind)

    several = out and refs.targets > 1 and not s.loops
    for t in range(refs.targets) if several else [turn]:
        token = (jnp.int32(t),) if several else ()
        for n, slot in enumerate(table.of_step(refs, table.TARGET + t if out else table.SOURCE, i)):
            copy(n, slot, *token)


def _ends(refs: DecodeRefs, s: DecodeStatic, kind: str, slot, place, conv, out: bool) -> list[tuple[Any, ...]]:
    """Return the parts of a slot that are copied, each with its buffer of all sequences, and its token in it."""
    if kind == "conv":
        arrays = zip(refs.pools.conv, refs.buffers.conv_out if out else refs.buffers.conv_in, strict=True)
        # Over a ring the slots of all tokens of a decode are one after the other.
        W = s.decode_tokens if refs.has_rings else 1
        at = pl.ds(slot * jnp.int32(W), W) if out and W > 1 else conv
        return [(pool.at[at], buffer) for pool, buffer in arrays]
    if kind == "states":
        at = slot if refs.pools.states.shape[1] == s.HV else (slot, pl.ds(s.first, s.HV))
        found = [(refs.pools.states.at[at], refs.buffers.after if out else refs.buffers.before)]
        if refs.pools.scales is not None:
            found.append((refs.pools.scales.at[at], refs.buffers.scale_out if out else refs.buffers.scale_in))
        return found
    pool, before, after = {
        "keys": (refs.pools.keys, refs.buffers.ring_key, refs.buffers.new_key),
        "writes": (refs.pools.writes, refs.buffers.ring_write, refs.buffers.new_write),
        "gates": (refs.pools.gates, refs.buffers.ring_gate, refs.buffers.new_gate),
    }[kind]
    if not out or (kind == "gates" and refs.work.starts is None):
        return [(pool.at[slot], after if out else before)]
    place = jnp.maximum(place, jnp.int32(0))
    if len(before.shape) > 4:
        # Tokens have a dimension.
        token = place if s.decode_tokens == 1 else pl.ds(place, s.decode_tokens)
        return [(pool.at[slot, token], after)]
    # The rows of a token are one after the other. Rows of several tokens may begin in one register and end in another,
    # which not every compiler copies, so every token has its copy.
    rows = after.shape[-2]
    row_of = lambda place: pl.multiple_of(place * jnp.int32(rows), rows)
    if s.decode_tokens == 1:
        return [(pool.at[slot, pl.ds(row_of(place), rows)], after)]
    tokens = range(s.decode_tokens)
    return [(pool.at[slot, pl.ds(row_of(place + jnp.int32(t)), rows)], after, jnp.int32(t)) for t in tokens]
