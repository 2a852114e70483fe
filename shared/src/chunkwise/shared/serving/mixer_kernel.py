"""The kernel of decodes: a grid step takes some sequences, and reads and writes their slots.

While it computes with `mixer_tile`, slots of the next sequences are copied in, and slots of earlier sequences are
copied out. The first grid step finds the token and the slots of every sequence from the boundaries and slots of the
call, so that XLA does nothing around the launch.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from chunkwise.shared import tuning
from chunkwise.shared.kernels import packed, pools, tiles
from chunkwise.shared.serving import mixer_reads, mixer_ring, mixer_tile, ring_tile
from chunkwise.shared.serving.mixer_refs import MixerRefs
from chunkwise.shared.serving.mixer_tile import MixerStatic

# How many buffers the groups of sequences take in turn.
BUFFERS = 2
# The numbers of a sequence in the table in scalar memory; the slots that it writes are the last ones.
_START, _SOURCE, _PLACE, _TOKENS, _CONV, _TARGET = range(6)
# How many sequences an iteration puts into the table.
_UNROLLED = 4


def numbers(targets: int) -> int:
    """Return how many numbers the table has for a sequence that writes so many slots."""
    return _TARGET + targets


def mixer_kernel(refs: MixerRefs, s: MixerStatic):
    """Run the sequences of a grid step."""
    i, n = pl.program_id(0), refs.before.shape[1]
    last = refs.table.shape[0] // (n * numbers(refs.targets)) - 1

    @pl.when(i == 0)
    def _():
        if refs.has_rings:
            _copy_counts(refs)
        _fill_table(refs, s)
        _load_tokens(refs)
        _copy_slots(refs, s, i, pools.start)

    # A buffer is filled again only after its copies have gone out.
    pl.when(i >= BUFFERS)(lambda: _copy_slots(refs, s, i - BUFFERS, pools.wait, out=True))
    pl.when(i < last)(lambda: _copy_slots(refs, s, i + 1, pools.start))
    _copy_slots(refs, s, i, pools.wait)
    _clear_new(refs, i)
    if refs.has_rings:
        _fold_rings(refs, s, i)
    _run_sequences(refs, s, i)

    @pl.when(i == last)
    def _():
        pl.when(i >= 1)(lambda: _copy_slots(refs, s, i - 1, pools.wait, out=True))
        _copy_slots(refs, s, i, pools.wait, out=True)
        T = refs.o.shape[0]
        refs.o[...] = refs.outputs[:T].astype(refs.o.dtype)
        if refs.has_rings:
            _copy_counts(refs, out=True)


def _copy_counts(refs: MixerRefs, out: bool = False) -> None:
    """Copy the numbers of tokens of all rings to scalar memory, or with `out` back."""
    pairs = (refs.count_out, refs.counts), (refs.drafts_out, refs.drafts_of)
    copies = [pltpu.make_async_copy(*(ends[::-1] if out else ends), refs.counting) for ends in pairs]
    for copy in copies:
        copy.start()
    for copy in copies:
        copy.wait()


def _fill_table(refs: MixerRefs, s: MixerStatic) -> None:
    """Fill the table of sequences; for any int32 values, tokens lie within the stream and slots within the pools."""
    N, T = refs.boundaries.shape[0] - 1, jnp.int32(refs.o.shape[0])
    slots = jnp.uint32(min(pool.shape[0] for pool in (refs.states_out, *refs.arrays("conv", "_out"))))
    least = jnp.minimum(refs.decodes[0], refs.sequences[0])
    existing = lambda slot: jnp.where(lax.lt(lax.bitcast_convert_type(slot, jnp.uint32), slots), slot, jnp.int32(-1))

    # The first of the slots that a sequence writes.
    place_of = lambda n: n if refs.targets == 1 else n * jnp.int32(refs.targets)

    def source_of(n):
        if refs.read is not None:
            return existing(refs.read[n])
        first = place_of(n)
        if refs.has_rings or refs.accepted is None:
            return existing(refs.write[first])
        last = refs.accepted[n] - jnp.int32(1)
        slot = existing(refs.write[first + jnp.clip(last, 0, jnp.int32(refs.targets - 1))])
        return jnp.where((last >= 0) & (last < jnp.int32(refs.targets)), slot, jnp.int32(-1))

    def fill(n, begin):
        inside, at = jnp.minimum(n, jnp.int32(N - 1)), n * jnp.int32(numbers(refs.targets))
        decodes = (n < least) & (n < jnp.int32(N))
        end = jnp.where(decodes, jnp.clip(refs.boundaries[inside + 1], begin, T), begin)
        exists, tokens = end > begin, jnp.minimum(end - begin, jnp.int32(s.decode_tokens))
        source = source_of(inside)
        if refs.continues is not None:
            source = jnp.where(refs.continues[inside] > 0, source, jnp.int32(-1))
        refs.table[at + jnp.int32(_START)] = jnp.where(exists, begin, T)
        refs.table[at + jnp.int32(_SOURCE)] = source = jnp.where(exists, source, jnp.int32(-1))
        target, first = jnp.int32(-1), place_of(inside)
        for t in range(refs.targets):
            target = existing(refs.write[first + jnp.int32(t) if t else first])
            target = jnp.where(jnp.int32(t) < tokens if t else exists, target, jnp.int32(-1))
            refs.table[at + jnp.int32(_TARGET + t)] = target
        if s.decode_tokens > 1:
            refs.table[at + jnp.int32(_TOKENS)] = tokens
        if refs.has_rings:
            _count_tokens(refs, s, n, source, target, tokens)
        return end

    sequences = refs.table.shape[0] // numbers(refs.targets)
    some = tuning.largest_divisor(sequences, _UNROLLED)

    # Unrolled here, because JAX's own unrolling counts in 64 bits where users enable them.
    def fill_some(turn, begin):
        for j in range(some):
            begin = fill(turn * jnp.int32(some) + jnp.int32(j), begin)
        return begin

    first = jnp.clip(refs.boundaries[0], jnp.int32(0), T)
    lax.fori_loop(jnp.int32(0), jnp.int32(sequences // some), fill_some, first)


def _count_tokens(refs: MixerRefs, s: MixerStatic, n, source, target, tokens) -> None:
    """Put the place of the tokens of sequence n in its ring into the table, and count the tokens."""
    L, W, zero = jnp.int32(refs.ring_key.shape[2] // s.H), jnp.int32(s.decode_tokens), jnp.int32(0)
    slot, at = jnp.maximum(source, zero), n * jnp.int32(numbers(1))
    kept = jnp.clip(refs.counts[slot], zero, L)
    if s.decode_tokens > 1 or refs.accepted is not None:
        drafts = jnp.clip(refs.drafts_of[slot], zero, kept)
        inside = jnp.minimum(n, jnp.int32(refs.write.shape[0] - 1))
        accepted = drafts if refs.accepted is None else jnp.clip(refs.accepted[inside], zero, drafts)
        kept = kept - drafts + accepted
        # Every token of a decode leaves the inputs of the convolutions in a slot of its own.
        last = jnp.clip(accepted, jnp.int32(1), W) - jnp.int32(1)
        refs.table[at + jnp.int32(_CONV)] = slot * W + last
    kept = jnp.where(source >= 0, kept, zero)
    stays = (kept <= L - W) & (source == target)
    refs.table[at + jnp.int32(_PLACE)] = jnp.where(stays, kept, jnp.int32(-1) - kept)

    @pl.when(target >= 0)
    def _():
        refs.counts[target] = jnp.where(stays, kept, zero) + tokens
        refs.drafts_of[target] = tokens


def _load_tokens(refs: MixerRefs) -> None:
    """Store the arrays of tokens side by side as float32, because a load of one float32 row may begin at any row."""
    T = refs.o.shape[0]
    for name, lanes in refs.lanes.items():
        refs.tokens[:T, lanes] = getattr(refs, name)[...].astype(jnp.float32)
        # The row for sequences without a token.
        refs.tokens[T:, lanes] = jnp.zeros((1, lanes.stop - lanes.start), jnp.float32)
    for name, weight in zip(("x0", "x1", "x2"), refs.arrays("w"), strict=False):
        refs.taps[:, refs.lanes[name]] = weight[...].astype(jnp.float32).T
    # The output of a token is zero if no sequence has the token.
    refs.outputs[...] = jnp.zeros_like(refs.outputs)


def _numbers(refs: MixerRefs, number: int, i) -> list[jax.Array]:
    """Return one number of the table for each sequence of grid step i; the numbers of a sequence are consecutive."""
    n, size = refs.before.shape[1], numbers(refs.targets)
    first = i * jnp.int32(n * size)
    return [refs.table[first + jnp.int32(place * size + number)] for place in range(n)]


def _buffer(i) -> jax.Array:
    return jnp.bitwise_and(i, jnp.int32(BUFFERS - 1))


def _copy_slots(refs: MixerRefs, s: MixerStatic, i, act, *only: str, out: bool = False) -> None:
    """Start, or wait for, the copies of the slots that grid step i reads, or with `out` of those that it writes.

    With `only` they are the copies of some kinds: "conv", "states", or of rings "keys", "writes" and "gates".
    """
    b, semaphores = _buffer(i), refs.stores if out else refs.reads
    # Numbers are read here, because a read under a condition takes longer.
    places = _numbers(refs, _PLACE, i) if refs.has_rings else None
    convs = _numbers(refs, _CONV, i) if refs.has_rings and s.decode_tokens > 1 else None

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
                    pl.when(place < 0)(lambda: move("states"))
                else:
                    move(kind)

    for t in range(refs.targets if out else 1):
        token = (jnp.int32(t),) if out and refs.targets > 1 else ()
        for n, slot in enumerate(_numbers(refs, _TARGET + t if out else _SOURCE, i)):
            copy(n, slot, *token)


def _ends(
    refs: MixerRefs, s: MixerStatic, kind: str, slot, place, conv, out: bool
) -> list[tuple[Any, ...]]:  # fmt: skip
    """Return the parts of a slot that are copied, each with its buffer of all sequences, and its token in it."""
    if kind == "conv":
        arrays = zip(refs.arrays("conv", "_out"), refs.arrays("out" if out else "in"), strict=True)
        # Over a ring the slots of all tokens of a decode are one after the other.
        W = s.decode_tokens if refs.has_rings else 1
        at = pl.ds(slot * jnp.int32(W), W) if out and W > 1 else conv
        return [(pool.at[at], buffer) for pool, buffer in arrays]
    if kind == "states":
        found = [(refs.states_out.at[slot], refs.after if out else refs.before)]
        if refs.scales_out is not None:
            found.append((refs.scales_out.at[slot], refs.scale_out if out else refs.scale_in))
        return found
    pool, before, after = {
        "keys": (refs.keys_out, refs.ring_key, refs.new_key),
        "writes": (refs.writes_out, refs.ring_write, refs.new_write),
        "gates": (refs.gates_out, refs.ring_gate, refs.new_gate),
    }[kind]
    if not out or (kind == "gates" and refs.starts is None):
        return [(pool.at[slot], after if out else before)]
    # The rows of a token are one after the other. Rows of several tokens may begin in one register and end in another,
    # which not every compiler copies, so every token has its copy.
    rows, place = after.shape[-2], jnp.maximum(place, jnp.int32(0))
    row_of = lambda place: pl.multiple_of(place * jnp.int32(rows), rows)
    if s.decode_tokens == 1:
        return [(pool.at[slot, pl.ds(row_of(place), rows)], after)]
    tokens = range(s.decode_tokens)
    return [(pool.at[slot, pl.ds(row_of(place + jnp.int32(t)), rows)], after, jnp.int32(t)) for t in tokens]


def _clear_new(refs: MixerRefs, i) -> None:
    """Put zeros into the buffers of sequences that start from no slot."""
    b, slots = _buffer(i), _numbers(refs, _SOURCE, i)

    # One branch skips all sequences, because most steps have no such sequence.
    @pl.when(functools.reduce(jnp.minimum, slots) < 0)
    def _():
        for place, slot in enumerate(slots):
            pl.when(slot < 0)(functools.partial(_clear_state, refs, b, jnp.int32(place)))


def _clear_state(refs: MixerRefs, b, place) -> None:
    for buffer in (refs.before, refs.scale_in, *refs.arrays("in")):
        if buffer is not None:
            buffer[b, place] = jnp.zeros(buffer.shape[2:], buffer.dtype)


def _fold_rings(refs: MixerRefs, s: MixerStatic, i) -> None:
    """Fold the rings of grid step i that have no room, or whose sequence goes to another slot."""
    b, n = _buffer(i), refs.before.shape[1]

    def fold(place, carry):
        at = (i * jnp.int32(n) + place) * jnp.int32(numbers(1)) + jnp.int32(_PLACE)
        kept = jnp.int32(-1) - refs.table[at]

        @pl.when(kept >= 0)
        def _():
            heads = mixer_tile.by_row(range(s.HV), s)
            states = [refs.before[b, place, h] for h in heads]
            scales = [None if refs.scale_in is None else refs.scale_in[b, place, h : h + 1] for h in heads]
            ring = (x[b, place] for x in (refs.ring_key, refs.ring_write, refs.ring_gate))
            folded = mixer_ring.fold(states, scales, *ring, kept)
            for h, (S, scale) in zip(heads, folded, strict=True):
                refs.before[b, place, h] = refs.after[b, place, h] = S
                if scale is not None:
                    refs.scale_in[b, place, h : h + 1] = refs.scale_out[b, place, h : h + 1] = scale

        return carry

    # Most grid steps fold no ring.
    pl.when(functools.reduce(jnp.minimum, _numbers(refs, _PLACE, i)) < 0)(
        lambda: lax.fori_loop(jnp.int32(0), jnp.int32(n), fold, None)
    )


def _run_sequences(refs: MixerRefs, s: MixerStatic, i) -> None:
    """Run the tokens of the sequences of grid step i."""
    b, starts = _buffer(i), _numbers(refs, _START, i)
    if s.decode_tokens > 1:
        # Tokens that a sequence does not have are rows of zeros.
        none, tokens = jnp.int32(refs.o.shape[0]), _numbers(refs, _TOKENS, i)
        starts = [
            jnp.where(jnp.int32(t) < count, start + jnp.int32(t), none)
            for t in range(s.decode_tokens) for start, count in zip(starts, tokens, strict=True)
        ]  # fmt: skip
    # How many tokens of its ring a sequence reads; its new token goes to this place.
    counts = [jnp.maximum(x, jnp.int32(0)) for x in _numbers(refs, _PLACE, i)] if refs.has_rings else None
    for place, start in enumerate(starts):
        refs.rows[place : place + 1, :] = refs.tokens[pl.ds(start, 1), :]
    channels = [x for j in range(len(refs.arrays("x"))) for x in _channels(refs, s, b, j)]
    # Copies start as early as possible, so that they overlap with the computation.
    store = functools.partial(_copy_slots, refs, s, i, pools.start, out=True)
    store("conv")
    q, k, v = (
        _by_head(channels, *heads) for heads in ((0, s.H, s.K), (s.H * s.K, s.H, s.K), (2 * s.H * s.K, s.HV, s.V))
    )
    if s.normalise:
        q, k = [tiles.l2norm(x) for x in q], [tiles.l2norm(x) for x in k]
    q = [x * jnp.float32(s.scale) for x in q]
    gates = _gates(refs, s)
    decays = [jnp.exp(mixer_tile.accumulate(x, s)) for x in gates]
    if refs.has_rings:
        _append_keys(refs, s, b, counts, k, gates)
    beta = None if refs.beta is None else mixer_tile.step_size(refs.rows[:, refs.lanes["beta"]], s)
    S_k, S_q = mixer_reads.read_states(refs, s, b, counts, q, k, decays)
    for h in range(s.HV):
        at = slice(h * s.V, (h + 1) * s.V)
        step = None if beta is None else beta[:, h : h + 1]
        refs.made[:, at], o = mixer_tile.run_rule(
            q[h // s.group], k[h // s.group], v[h], gates[h], step, S_k[h], S_q[h], s
        )
        if s.norm is not None:
            first = refs.lanes["z"].start + h * s.V
            o = mixer_tile.norm_head(o, refs.rows[:, first : first + s.V], refs.norm[...].astype(jnp.float32), s.norm)
        # The output replaces channels that have been read; there are more channels than outputs.
        refs.rows[:, at] = o
    for place, start in enumerate(starts):
        refs.outputs[pl.ds(start, 1), :] = refs.rows[place : place + 1, : s.HV * s.V]
    if refs.has_rings:
        made = [refs.made[:, h * s.V : (h + 1) * s.V] for h in mixer_tile.by_row(range(s.HV), s)]
        _store_tokens(refs.new_write, s, b, made)
    else:
        _update_states(refs, s, b, k, decays if s.decode_tokens == 1 else [jnp.exp(x) for x in gates])
    store(*refs.kinds[1:])


def _update_states(refs: MixerRefs, s: MixerStatic, b, k, decays) -> None:
    """Store the states after each token of a grid step in the buffers from which they are copied out.

    The decays are those of each token alone.
    """
    n = refs.before.shape[1]
    for place in range(n):
        rows = [slice(row, row + 1) for row in range(place, refs.rows.shape[0], n)]
        for key in range(s.H):
            columns = [tiles.to_column(k[key][row][None])[0] for row in rows]
            for h in range(key * s.group, (key + 1) * s.group):
                S, of_head = refs.before[b, place, h].astype(jnp.float32), slice(h * s.V, (h + 1) * s.V)
                for t, (row, column) in enumerate(zip(rows, columns, strict=True)):
                    decay, at = decays[h][row], (b, place, *((t,) if refs.targets > 1 else ()))
                    if t == 0 and refs.scale_in is not None:
                        decay = decay * refs.scale_in[b, place, h : h + 1]
                    S = mixer_tile.next_state(S, decay, column, refs.made[row, of_head])
                    refs.after[(*at, h)], scales = ring_tile.stored(S, refs.after.dtype)
                    if scales is not None:
                        refs.scale_out[(*at, slice(h, h + 1))] = scales


def _append_keys(refs: MixerRefs, s: MixerStatic, b, counts, k, gates) -> None:
    """Store the keys and gates of a grid step in the buffers from which they are copied to rings."""
    _store_tokens(refs.new_key, s, b, k)
    if refs.starts is not None:
        _store_tokens(refs.new_gate, s, b, mixer_tile.by_row(gates, s))
        return
    rows = mixer_tile.by_token(jnp.concatenate(mixer_tile.by_row(gates, s), axis=1), s)
    for place, at in enumerate(counts):
        refs.new_gate[b, place] = refs.ring_gate[b, place]
        for t, row in enumerate(rows):
            refs.new_gate[b, place, pl.ds(at + jnp.int32(t), 1), :] = row[place : place + 1]


def _store_tokens(buffer: jax.Ref, s: MixerStatic, b, heads: list[jax.Array]) -> None:
    """Store heads [m, D] in a buffer of the tokens of all sequences."""
    for t, token in enumerate(zip(*(mixer_tile.by_token(x, s) for x in heads), strict=True)):
        at = (b, slice(None), t) if s.decode_tokens > 1 else b
        buffer[at] = jnp.stack(token, axis=1).astype(buffer.dtype)


def _channels(refs: MixerRefs, s: MixerStatic, b, j: int) -> list[jax.Array]:
    """Return the channels of array j after the convolution, 128 at a time, [n, 128] each."""
    x = refs.rows[:, refs.lanes[f"x{j}"]]
    if refs.w0 is not None:
        weight, biases = refs.taps[:, refs.lanes[f"x{j}"]], refs.arrays("b")
        before, after = refs.arrays("in")[j], refs.arrays("out")[j]
        width, W = weight.shape[0], s.decode_tokens
        inputs = [*(before[b, :, t].astype(jnp.float32) for t in range(width - 1)), *mixer_tile.by_token(x, s)]
        for t in range(W):
            for i in range(width - 1):
                at = (b, slice(None), t, i) if W > 1 else (b, slice(None), i)
                after[at] = inputs[t + 1 + i].astype(after.dtype)
        taps = [jnp.concatenate(inputs[i : i + W]) for i in range(width)]
        bias = biases[j][...].astype(jnp.float32) if biases else None
        x = mixer_tile.convolve(taps, weight, bias, s)
    return [x[:, at : at + packed.LANES] for at in range(0, x.shape[1], packed.LANES)]


def _by_head(channels: list[jax.Array], first: int, heads: int, D: int) -> list[jax.Array]:
    """Return the heads of D channels that begin at channel `first`, [n, D] each."""
    width = D // packed.LANES
    starts = range(first // packed.LANES, first // packed.LANES + heads * width, width)
    return [jnp.concatenate(channels[at : at + width], axis=1) for at in starts]


def _gates(refs: MixerRefs, s: MixerStatic) -> list[jax.Array]:
    """Return the decays of every value head in nats, [n, 1] or [n, K] each."""
    g = refs.rows[:, refs.lanes["g"]]
    A_log, dt_bias = (None if ref is None else ref[...].astype(jnp.float32) for ref in (refs.A_log, refs.dt_bias))
    size = g.shape[1] // s.HV
    if size == 1:
        found = mixer_tile.gate(g, A_log, dt_bias, s)
        return [found[:, h : h + 1] for h in range(s.HV)]
    part: Callable[..., Any] = lambda x, h, size: None if x is None else x[:, h * size : (h + 1) * size]
    return [mixer_tile.gate(part(g, h, size), part(A_log, h, 1), part(dt_bias, h, size), s) for h in range(s.HV)]
