"""The table of the kernel that decodes: the token, the slots and the ring of every sequence, in scalar memory."""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from chunkwise.shared import tuning
from chunkwise.shared.serving.decode.records import DecodeStatic
from chunkwise.shared.serving.decode.refs import DecodeRefs

# The numbers of a sequence in the table; the slots that it writes are the last ones.
START, SOURCE, PLACE, TOKENS, CONV, TARGET = range(6)
# How many sequences an iteration puts into the table.
_UNROLLED = 4


def numbers(targets: int) -> int:
    """Return how many numbers the table has for a sequence that writes so many slots."""
    return TARGET + targets


def fill(refs: DecodeRefs, s: DecodeStatic) -> None:
    """Fill the table of sequences; for any int32 values, tokens lie within the stream and slots within the pools."""
    N, T = refs.step.boundaries.shape[0] - 1, jnp.int32(refs.tokens.o.shape[0])
    slots = jnp.uint32(min(pool.shape[0] for pool in (refs.pools.states, *refs.pools.conv)))
    least = jnp.minimum(refs.step.decodes[0], refs.step.sequences[0])
    existing = lambda slot: jnp.where(lax.lt(lax.bitcast_convert_type(slot, jnp.uint32), slots), slot, jnp.int32(-1))

    # The first of the slots that a sequence writes.
    place_of = lambda n: n if refs.targets == 1 else n * jnp.int32(refs.targets)

    def source_of(n):
        if refs.step.read is not None:
            return existing(refs.step.read[n])
        first = place_of(n)
        if refs.has_rings or refs.step.accepted is None:
            return existing(refs.step.write[first])
        last = refs.step.accepted[n] - jnp.int32(1)
        slot = existing(refs.step.write[first + jnp.clip(last, 0, jnp.int32(refs.targets - 1))])
        return jnp.where((last >= 0) & (last < jnp.int32(refs.targets)), slot, jnp.int32(-1))

    def fill_one(n, begin):
        inside, at = jnp.minimum(n, jnp.int32(N - 1)), n * jnp.int32(numbers(refs.targets))
        decodes = (n < least) & (n < jnp.int32(N))
        end = jnp.where(decodes, jnp.clip(refs.step.boundaries[inside + 1], begin, T), begin)
        exists, most = end > begin, jnp.int32(s.W) if s.single else T
        tokens = jnp.minimum(end - begin, most)
        # A sequence of any number of tokens leaves its state without any, too.
        named = exists if s.single else decodes
        source = source_of(inside)
        if refs.step.continues is not None:
            source = jnp.where(refs.step.continues[inside] > 0, source, jnp.int32(-1))
        refs.step.table[at + jnp.int32(START)] = jnp.where(exists, begin, T)
        refs.step.table[at + jnp.int32(SOURCE)] = source = jnp.where(named, source, jnp.int32(-1))
        target, first = jnp.int32(-1), place_of(inside)
        for t in range(refs.targets):
            target = existing(refs.step.write[first + jnp.int32(t) if t else first])
            target = jnp.where(jnp.int32(t) < tokens if t else named, target, jnp.int32(-1))
            refs.step.table[at + jnp.int32(TARGET + t)] = target
        if s.loops or s.decode_tokens > 1:
            refs.step.table[at + jnp.int32(TOKENS)] = tokens
        if refs.has_rings:
            _count_tokens(refs, s, n, source, target, tokens)
        return end

    sequences = refs.step.table.shape[0] // numbers(refs.targets)
    some = tuning.largest_divisor(sequences, _UNROLLED)

    # Unrolled here, because JAX's own unrolling counts in 64 bits where users enable them.
    def fill_some(turn, begin):
        for j in range(some):
            begin = fill_one(turn * jnp.int32(some) + jnp.int32(j), begin)
        return begin

    first = jnp.clip(refs.step.boundaries[0], jnp.int32(0), T)
    lax.fori_loop(jnp.int32(0), jnp.int32(sequences // some), fill_some, first)


def _count_tokens(refs: DecodeRefs, s: DecodeStatic, n, source, target, tokens) -> None:
    """Put the place of the tokens of sequence n in its ring into the table, and count the tokens."""
    L, W, zero = jnp.int32(refs.ring_tokens), jnp.int32(s.decode_tokens), jnp.int32(0)
    slot, at = jnp.maximum(source, zero), n * jnp.int32(numbers(1))
    kept = jnp.clip(refs.buffers.counts[slot], zero, L)
    if s.decode_tokens > 1 or refs.step.accepted is not None:
        drafts = jnp.clip(refs.buffers.drafts_of[slot], zero, kept)
        inside = jnp.minimum(n, jnp.int32(refs.step.write.shape[0] - 1))
        accepted = drafts if refs.step.accepted is None else jnp.clip(refs.step.accepted[inside], zero, drafts)
        kept = kept - drafts + accepted
        # Every token of a decode leaves the inputs of the convolutions in a slot of its own.
        last = jnp.clip(accepted, jnp.int32(1), W) - jnp.int32(1)
        refs.step.table[at + jnp.int32(CONV)] = slot * W + last
    kept = jnp.where(source >= 0, kept, zero)
    stays = (kept <= L - W) & (source == target)
    refs.step.table[at + jnp.int32(PLACE)] = jnp.where(stays, kept, jnp.int32(-1) - kept)

    @pl.when(target >= 0)
    def _():
        refs.buffers.counts[target] = jnp.where(stays, kept, zero) + tokens
        refs.buffers.drafts_of[target] = tokens


def of_step(refs: DecodeRefs, number, i) -> list[jax.Array]:
    """Return one number of the table for each sequence of grid step i; the numbers of a sequence are consecutive."""
    n, size = refs.buffers.before.shape[1], numbers(refs.targets)
    first, known = i * jnp.int32(n * size), number
    if not isinstance(number, int):
        first, known = first + number, 0
    return [refs.step.table[first + jnp.int32(place * size + known)] for place in range(n)]
