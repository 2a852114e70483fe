"""The kernel of decodes of one token: a grid step takes some sequences, and reads and writes their slots.

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
from chunkwise.shared.serving import mixer_ring, mixer_tile
from chunkwise.shared.serving.mixer_refs import MixerRefs
from chunkwise.shared.serving.mixer_tile import MixerStatic

# How many buffers the groups of sequences take in turn.
BUFFERS = 2
# The numbers of a sequence in the table in scalar memory; the last number is only for rings.
_START, _SOURCE, _TARGET, _PLACE = range(4)
NUMBERS = 4
# How many sequences an iteration puts into the table.
_UNROLLED = 4


def mixer_kernel(refs: MixerRefs, s: MixerStatic):
    """Run the sequences of a grid step."""
    i, n = pl.program_id(0), refs.rows.shape[0]
    last = refs.table.shape[0] // (n * NUMBERS) - 1

    @pl.when(i == 0)
    def _():
        if refs.has_rings:
            _copy_counts(refs)
        _fill_table(refs)
        _load_tokens(refs)
        _copy_slots(refs, i, pools.start)

    # A buffer is filled again only after its copies have gone out.
    pl.when(i >= BUFFERS)(lambda: _copy_slots(refs, i - BUFFERS, pools.wait, out=True))
    pl.when(i < last)(lambda: _copy_slots(refs, i + 1, pools.start))
    _copy_slots(refs, i, pools.wait)
    _clear_new(refs, i)
    if refs.has_rings:
        _fold_rings(refs, s, i)
    _run_sequences(refs, s, i)

    @pl.when(i == last)
    def _():
        pl.when(i >= 1)(lambda: _copy_slots(refs, i - 1, pools.wait, out=True))
        _copy_slots(refs, i, pools.wait, out=True)
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


def _fill_table(refs: MixerRefs) -> None:
    """Fill the table of sequences; for any int32 values, tokens lie within the stream and slots within the pools."""
    N, T = refs.write.shape[0], jnp.int32(refs.o.shape[0])
    slots = jnp.uint32(min(pool.shape[0] for pool in (refs.states_out, *refs.arrays("conv", "_out"))))
    least = jnp.minimum(refs.decodes[0], refs.sequences[0])
    existing = lambda slot: jnp.where(lax.lt(lax.bitcast_convert_type(slot, jnp.uint32), slots), slot, jnp.int32(-1))

    def fill(n, begin):
        inside = jnp.minimum(n, jnp.int32(N - 1))
        decodes = (n < least) & (n < jnp.int32(N))
        end = jnp.where(decodes, jnp.clip(refs.boundaries[inside + 1], begin, T), begin)
        exists = end > begin
        source = existing(refs.read[inside])
        if refs.continues is not None:
            source = jnp.where(refs.continues[inside] > 0, source, jnp.int32(-1))
        refs.table[n * jnp.int32(NUMBERS) + jnp.int32(_START)] = jnp.where(exists, begin, T)
        refs.table[n * jnp.int32(NUMBERS) + jnp.int32(_SOURCE)] = source = jnp.where(exists, source, jnp.int32(-1))
        refs.table[n * jnp.int32(NUMBERS) + jnp.int32(_TARGET)] = target = jnp.where(
            exists, existing(refs.write[inside]), jnp.int32(-1)
        )
        if refs.has_rings:
            _count_tokens(refs, n, source, target)
        return end

    sequences = refs.table.shape[0] // NUMBERS
    some = tuning.largest_divisor(sequences, _UNROLLED)

    # Unrolled here, because JAX's own unrolling counts in 64 bits where users enable them.
    def fill_some(turn, begin):
        for j in range(some):
            begin = fill(turn * jnp.int32(some) + jnp.int32(j), begin)
        return begin

    first = jnp.clip(refs.boundaries[0], jnp.int32(0), T)
    lax.fori_loop(jnp.int32(0), jnp.int32(sequences // some), fill_some, first)


def _count_tokens(refs: MixerRefs, n, source, target) -> None:
    """Put the place of a token in its ring into the table, and count the token."""
    L = jnp.int32(refs.ring_gate.shape[2])
    kept = jnp.clip(refs.counts[jnp.maximum(source, jnp.int32(0))], jnp.int32(0), L)
    kept = jnp.where(source >= 0, kept, jnp.int32(0))
    stays = (kept < L) & (source == target)
    refs.table[n * jnp.int32(NUMBERS) + jnp.int32(_PLACE)] = jnp.where(stays, kept, jnp.int32(-1) - kept)

    @pl.when(target >= 0)
    def _():
        refs.counts[target] = jnp.where(stays, kept, jnp.int32(0)) + jnp.int32(1)
        refs.drafts_of[target] = jnp.int32(1)


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
    n = refs.rows.shape[0]
    first = i * jnp.int32(n * NUMBERS)
    return [refs.table[first + jnp.int32(place * NUMBERS + number)] for place in range(n)]


def _buffer(i) -> jax.Array:
    return jnp.bitwise_and(i, jnp.int32(BUFFERS - 1))


def _copy_slots(refs: MixerRefs, i, act, *only: str, out: bool = False) -> None:
    """Start, or wait for, the copies of the slots that grid step i reads, or with `out` of those that it writes.

    With `only` they are the copies of some kinds: "conv", "states", or of rings "keys", "writes" and "gates".
    """
    b = _buffer(i)
    number, semaphores = (_TARGET, refs.stores) if out else (_SOURCE, refs.reads)
    # Numbers are read here, because a read under a condition takes longer.
    slots = _numbers(refs, number, i)
    places = _numbers(refs, _PLACE, i) if refs.has_rings else slots

    def copy(n, slot, place):
        def move(kind):
            for pool, buffer in _ends(refs, kind, slot, place, out):
                ends = pool, buffer.at[b, jnp.int32(n)]
                act(pltpu.make_async_copy(*(ends[::-1] if out else ends), semaphores.at[b]))

        @pl.when(slot >= 0)
        def _():
            for kind in only or refs.kinds:
                if kind == "states" and out and refs.has_rings:
                    pl.when(place < 0)(lambda: move("states"))
                else:
                    move(kind)

    for n, ends in enumerate(zip(slots, places, strict=True)):
        copy(n, *ends)


def _ends(refs: MixerRefs, kind: str, slot, place, out: bool) -> list[tuple[jax.Ref, jax.Ref]]:
    """Return the parts of a slot that are copied, each with its buffer of all sequences."""
    if kind == "conv":
        conv = zip(refs.arrays("conv", "_out"), refs.arrays("out" if out else "in"), strict=True)
        return [(pool.at[slot], buffer) for pool, buffer in conv]
    if kind == "states":
        return [(refs.states_out.at[slot], refs.after if out else refs.before)]
    pool, before, after = {
        "keys": (refs.keys_out, refs.ring_key, refs.new_key),
        "writes": (refs.writes_out, refs.ring_write, refs.new_write),
        "gates": (refs.gates_out, refs.ring_gate, refs.new_gate),
    }[kind]
    if not out or kind == "gates":
        return [(pool.at[slot], after if out else before)]
    # The rows of a token are one after the other.
    rows = after.shape[2]
    first = pl.multiple_of(jnp.maximum(place, jnp.int32(0)) * jnp.int32(rows), rows)
    return [(pool.at[slot, pl.ds(first, rows)], after)]


def _clear_new(refs: MixerRefs, i) -> None:
    """Put zeros into the buffers of sequences that start from no slot."""
    b, slots = _buffer(i), _numbers(refs, _SOURCE, i)

    # One branch skips all sequences, because most steps have no such sequence.
    @pl.when(functools.reduce(jnp.minimum, slots) < 0)
    def _():
        for place, slot in enumerate(slots):
            pl.when(slot < 0)(functools.partial(_clear_state, refs, b, jnp.int32(place)))


def _clear_state(refs: MixerRefs, b, place) -> None:
    for buffer in (refs.before, *refs.arrays("in")):
        buffer[b, place] = jnp.zeros(buffer.shape[2:], buffer.dtype)


def _fold_rings(refs: MixerRefs, s: MixerStatic, i) -> None:
    """Fold the rings of grid step i that are full, or whose sequence goes to another slot."""
    b, n = _buffer(i), refs.rows.shape[0]

    def fold(place, carry):
        kept = jnp.int32(-1) - refs.table[(i * jnp.int32(n) + place) * jnp.int32(NUMBERS) + jnp.int32(_PLACE)]

        @pl.when(kept >= 0)
        def _():
            heads = mixer_tile.by_row(range(s.HV), s)
            states = [refs.before[b, place, h] for h in heads]
            ring = (x[b, place] for x in (refs.ring_key, refs.ring_write, refs.ring_gate))
            folded = mixer_ring.fold(states, *ring, kept)
            for h, S in zip(heads, folded, strict=True):
                refs.before[b, place, h] = refs.after[b, place, h] = S

        return carry

    # Most grid steps fold no ring.
    pl.when(functools.reduce(jnp.minimum, _numbers(refs, _PLACE, i)) < 0)(
        lambda: lax.fori_loop(jnp.int32(0), jnp.int32(n), fold, None)
    )


def _run_sequences(refs: MixerRefs, s: MixerStatic, i) -> None:
    """Run the tokens of the sequences of grid step i."""
    b, starts = _buffer(i), _numbers(refs, _START, i)
    # How many tokens of its ring a sequence reads; its new token goes to this place.
    counts = [jnp.maximum(x, jnp.int32(0)) for x in _numbers(refs, _PLACE, i)] if refs.has_rings else None
    for place, start in enumerate(starts):
        refs.rows[place : place + 1, :] = refs.tokens[pl.ds(start, 1), :]
    channels = [x for j in range(len(refs.arrays("x"))) for x in _channels(refs, s, b, j)]
    # Copies start as early as possible, so that they overlap with the computation.
    store = functools.partial(_copy_slots, refs, i, pools.start, out=True)
    store("conv")
    q, k, v = (
        _by_head(channels, *heads) for heads in ((0, s.H, s.K), (s.H * s.K, s.H, s.K), (2 * s.H * s.K, s.HV, s.V))
    )
    if s.normalise:
        q, k = [tiles.l2norm(x) for x in q], [tiles.l2norm(x) for x in k]
    q = [x * jnp.float32(s.scale) for x in q]
    gates = _gates(refs, s)
    decays = [jnp.exp(x) for x in gates]
    if refs.has_rings:
        _append_keys(refs, s, b, counts, k, gates)
    beta = None if refs.beta is None else mixer_tile.step_size(refs.rows[:, refs.lanes["beta"]], s)
    S_k, S_q = _read_states(refs, s, b, counts, q, k, decays)
    for h in range(s.HV):
        at = slice(h * s.V, (h + 1) * s.V)
        new = v[h] if beta is None else beta[:, h : h + 1] * (v[h] - S_k[h])
        refs.made[:, at] = new
        # The state after the token is read without it: o = a S^T q + (k . q) new.
        o = S_q[h] + jnp.sum(q[h // s.group] * k[h // s.group], axis=1, keepdims=True) * new
        if s.norm is not None:
            first = refs.lanes["z"].start + h * s.V
            o = mixer_tile.norm_head(o, refs.rows[:, first : first + s.V], refs.norm[...].astype(jnp.float32), s.norm)
        # The output replaces channels that have been read; there are more channels than outputs.
        refs.rows[:, at] = o
    for place, start in enumerate(starts):
        refs.outputs[pl.ds(start, 1), :] = refs.rows[place : place + 1, : s.HV * s.V]
    if refs.has_rings:
        made = [refs.made[:, h * s.V : (h + 1) * s.V] for h in mixer_tile.by_row(range(s.HV), s)]
        refs.new_write[b] = jnp.stack(made, axis=1).astype(refs.new_write.dtype)
    else:
        _update_states(refs, s, b, k, decays)
    store(*refs.kinds[1:])


def _update_states(refs: MixerRefs, s: MixerStatic, b, k, decays) -> None:
    """Store the states after the tokens of a grid step in the buffer from which they are copied out."""
    for place in range(refs.rows.shape[0]):
        one = slice(place, place + 1)
        for key in range(s.H):
            column = tiles.to_column(k[key][one][None])[0]
            for h in range(key * s.group, (key + 1) * s.group):
                S = refs.before[b, place, h].astype(jnp.float32)
                S = mixer_tile.next_state(S, decays[h][one], column, refs.made[one, h * s.V : (h + 1) * s.V])
                refs.after[b, place, h] = S.astype(refs.after.dtype)


def _append_keys(refs: MixerRefs, s: MixerStatic, b, counts, k, gates) -> None:
    """Store the keys and gates of a grid step in the buffers from which they are copied to rings."""
    refs.new_key[b] = jnp.stack(k, axis=1).astype(refs.new_key.dtype)
    row = jnp.concatenate(mixer_tile.by_row(gates, s), axis=1)
    for place, at in enumerate(counts):
        refs.new_gate[b, place] = refs.ring_gate[b, place]
        refs.new_gate[b, place, pl.ds(at, 1), :] = row[place : place + 1]


def _channels(refs: MixerRefs, s: MixerStatic, b, j: int) -> list[jax.Array]:
    """Return the channels of array j after the convolution, 128 at a time, [n, 128] each."""
    x = refs.rows[:, refs.lanes[f"x{j}"]]
    if refs.w0 is not None:
        weight, biases = refs.taps[:, refs.lanes[f"x{j}"]], refs.arrays("b")
        before, after = refs.arrays("in")[j], refs.arrays("out")[j]
        taps = [*(before[b, :, t].astype(jnp.float32) for t in range(weight.shape[0] - 1)), x]
        for t in range(weight.shape[0] - 1):
            after[b, :, t] = taps[t + 1].astype(after.dtype)
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


def _read_states(refs: MixerRefs, s: MixerStatic, b, counts, q, k, decays) -> tuple[list[jax.Array], list[jax.Array]]:
    """Return the values that keys and queries read from decayed states and rings, [n, V] for every value head."""
    n, per_channel = refs.rows.shape[0], decays[0].shape[1] > 1
    on_matrix_unit = refs.before.dtype == jnp.bfloat16
    rows = [[x[h // s.group] * decays[h] if per_channel else x[h // s.group] for x in (k, q)] for h in range(s.HV)]
    if on_matrix_unit or refs.has_rings:
        _split_rows(refs, s, rows)
    # How many value heads have the same rows. The matrix unit takes products in the order of the program: those with
    # states fill the time of those of rings that wait for others.
    together = 1 if per_channel else s.group
    scores: Any = _score_rings(refs, s, b, counts) if refs.has_rings else None
    start: Any = None
    of_ring: Any = None
    weights: Any = None
    for h in range(0, s.HV, together):
        if refs.has_rings and h == s.H // 2 * together:
            start, weights = _weigh_rings(refs, s, b, counts, scores)
        heads = range(h, h + together)
        if on_matrix_unit:
            _read_together(refs, s, b, heads)
        else:
            for head in heads:
                _read_alone(refs, b, head, rows[head])
    if refs.has_rings:
        of_ring = _read_rings(refs, s, b, counts, weights)
    S_k, S_q = [], []
    for h in range(s.HV):
        first, row = 8 * n * h, mixer_tile.row_of(h, s)
        found: list[Any]
        if on_matrix_unit:
            of_part = [refs.products[pl.ds(first + j, n, stride=8), :] for j in range(2 * mixer_tile.PARTS)]
            found = [sum(of_part[0::2]), sum(of_part[1::2])]
        else:
            found = [refs.products[first + j * n : first + (j + 1) * n, :] for j in range(2)]
        if refs.has_rings:
            found = [start[:, row : row + 1] * x + y for x, y in zip(found, of_ring[row], strict=True)]
        S_k.append(found[0] if per_channel else decays[h] * found[0])
        S_q.append(found[1] if per_channel else decays[h] * found[1])
    return S_k, S_q


def _read_alone(refs: MixerRefs, b, head: int, rows: list[jax.Array]) -> None:
    """Put the products of keys and queries with the states of a value head into a buffer, by the vector unit."""
    n = refs.rows.shape[0]
    for place in range(n):
        S = refs.before[b, place, head]
        for j, x in enumerate(rows):
            at = 8 * n * head + j * n + place
            refs.products[at : at + 1, :] = mixer_tile.read_on_vector_unit(S, x[place : place + 1])


def _read_together(refs: MixerRefs, s: MixerStatic, b, heads) -> None:
    """Store the products of parts of keys and queries with the states of the value heads that share these parts.

    The states lie side by side, because the matrix unit of most chips has 256 columns.
    """
    n = refs.rows.shape[0]
    for place in range(n):
        # The rows of a sequence.
        some = refs.parts[pl.ds(mixer_tile.row_of(heads[0], s) * n + place, 8, stride=n * s.HV), :]
        S = jnp.concatenate([refs.before[b, place, h] for h in heads], axis=1)
        y = mixer_tile.read_on_matrix_unit(S, some)
        for j, h in enumerate(heads):
            first = 8 * (n * h + place)
            refs.products[first : first + 8, :] = y[:, j * s.V : (j + 1) * s.V]


def _split_rows(refs: MixerRefs, s: MixerStatic, rows) -> None:
    """Store parts of keys and queries of every value head, so that a load with a stride has the rows of a sequence.

    Row (j HV + r H + h) n + i is part j of head h R + r of sequence i: parts of keys and queries in turn, then two of
    zeros.
    """
    n = refs.rows.shape[0]
    for h, some in enumerate(rows):
        pairs = zip(*map(mixer_tile.exact_parts, some), strict=True)
        parts = [part for pair in pairs for part in pair]
        for j in range(8):
            at = (j * s.HV + mixer_tile.row_of(h, s)) * n
            refs.parts[at : at + n, :] = parts[j] if j < len(parts) else jnp.zeros_like(parts[0])


def _score_rings(refs: MixerRefs, s: MixerStatic, b, counts) -> jax.Array:
    """Return the products of keys and queries with the keys of rings, [n 2 HV, L H]."""
    n = refs.rows.shape[0]
    parts = mixer_ring.parts_of(refs.ring_key.dtype) * 2 * s.HV
    rows = [refs.parts[pl.ds(place, parts, stride=n), :] for place in range(n)]
    keys = [refs.ring_key[b, place] for place in range(n)]
    return mixer_ring.score(rows, keys, [count * jnp.int32(s.H) for count in counts], s.HV)


def _weigh_rings(refs: MixerRefs, s: MixerStatic, b, counts, scores) -> tuple[jax.Array, list[tuple[jax.Array, ...]]]:
    """Return the decays of states over rings [n, HV], and the weights of writes for keys and queries."""
    gates = [mixer_ring.existing(refs.ring_gate[b, place], count, 1) for place, count in enumerate(counts)]
    # Once for keys and once for queries.
    left, start = mixer_ring.remaining([jnp.concatenate([x, x], axis=1) for x in gates], s.HV)
    return start, mixer_ring.weigh(scores, left, s.HV, refs.ring_write.dtype)


def _read_rings(refs: MixerRefs, s: MixerStatic, b, counts, weights) -> list[list[jax.Array]]:
    """Return the values that keys and queries read from rings, [n, V] each, for every row of the order [R, H]."""
    n, rows = refs.rows.shape[0], 2 * s.HV
    for place, (x, count) in enumerate(zip(weights, counts, strict=True)):
        refs.ring_reads[place * rows : (place + 1) * rows, :] = mixer_ring.read(x, refs.ring_write[b, place], count)
    load = lambda row: refs.ring_reads[pl.ds(row, n, stride=rows), :]
    return [[load(row), load(s.HV + row)] for row in range(s.HV)]
