"""The kernel of decodes: a grid step takes some sequences, and reads and writes their slots.

While it computes with `decode.tile`, slots of the next sequences are copied in, and slots of earlier sequences are
copied out. The first grid step finds the token and the slots of every sequence from the boundaries and slots of the
call, so that XLA does nothing around the launch.
"""

import functools
import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from chunkwise.shared import tuning
from chunkwise.shared.kernels import activations, gate_activation, tiles
from chunkwise.shared.kernels.spans import pools
from chunkwise.shared.serving.decode import copies, reads, ring, table, tile
from chunkwise.shared.serving.decode.records import DecodeStatic
from chunkwise.shared.serving.decode.refs import DecodeRefs

# About how many value heads a fold takes at once.
_FOLDED = 8


def decode_kernel(refs: DecodeRefs, s: DecodeStatic):
    """Run the sequences of a grid step."""
    i, n = pl.program_id(0), refs.buffers.before.shape[1]
    last = refs.step.table.shape[0] // (n * table.numbers(refs.targets)) - 1

    @pl.when(i == 0)
    def _():
        if refs.has_rings:
            copies.copy_counts(refs)
        table.fill(refs, s)
        _load_tokens(refs)
        copies.copy_slots(refs, s, i, pools.start)

    # A buffer is filled again only after its copies have gone out. A loop awaits copies of several states by itself.
    wait = functools.partial(copies.copy_slots, refs, s, act=pools.wait, out=True)
    wait = (lambda i: None) if s.loops and refs.targets > 1 else wait
    pl.when(i >= copies.BUFFERS)(lambda: wait(i - copies.BUFFERS))
    pl.when(i < last)(lambda: copies.copy_slots(refs, s, i + 1, pools.start))
    copies.copy_slots(refs, s, i, pools.wait)
    _clear_new(refs, i)
    if refs.has_rings:
        _fold_rings(refs, s, i)
    (_run_in_turn if s.loops else _run_sequences)(refs, s, i)

    @pl.when(i == last)
    def _():
        pl.when(i >= 1)(lambda: wait(i - 1))
        wait(i)
        T = refs.tokens.o.shape[0]
        if _finishes_last(refs, s):
            _finish_pairs(refs, s)
        refs.tokens.o[...] = refs.tokens.outputs[:T].astype(refs.tokens.o.dtype)
        if refs.has_rings:
            copies.copy_counts(refs, out=True)


def _load_tokens(refs: DecodeRefs) -> None:
    """Store the arrays of tokens side by side as float32, because a load of one float32 row may begin at any row."""
    T = refs.tokens.o.shape[0]
    for name, lanes in refs.lanes.items():
        refs.tokens.side_by_side[:T, lanes] = refs.tokens.named[name][...].astype(jnp.float32)
        # The row for sequences without a token.
        refs.tokens.side_by_side[T:, lanes] = jnp.zeros((1, lanes.stop - lanes.start), jnp.float32)
    for name, weight in zip(("x0", "x1", "x2"), refs.work.w, strict=False):
        refs.work.taps[:, refs.lanes[name]] = weight[...].astype(jnp.float32).T
    # The output of a token is zero if no sequence has the token.
    refs.tokens.outputs[...] = jnp.zeros_like(refs.tokens.outputs)


def _clear_new(refs: DecodeRefs, i) -> None:
    """Put zeros into the buffers of sequences that start from no slot."""
    b, slots = copies.buffer_of(i), table.of_step(refs, table.SOURCE, i)

    # One branch skips all sequences, because most grid steps have no such sequence.
    @pl.when(functools.reduce(jnp.minimum, slots) < 0)
    def _():
        for place, slot in enumerate(slots):
            pl.when(slot < 0)(functools.partial(_clear_state, refs, b, jnp.int32(place)))


def _clear_state(refs: DecodeRefs, b, place) -> None:
    for buffer in (refs.buffers.before, refs.buffers.scale_in, *refs.buffers.conv_in):
        if buffer is not None:
            buffer[b, place] = jnp.zeros(buffer.shape[2:], buffer.dtype)


def _fold_rings(refs: DecodeRefs, s: DecodeStatic, i) -> None:
    """Fold the rings of grid step i that have no room, or whose sequence goes to another slot."""
    b, n = copies.buffer_of(i), refs.buffers.before.shape[1]

    def fold(place, carry):
        at = (i * jnp.int32(n) + place) * jnp.int32(table.numbers(1)) + jnp.int32(table.PLACE)
        kept = jnp.int32(-1) - refs.step.table[at]

        @pl.when(kept >= 0)
        def _():
            keys, writes, gates = (refs.ring(name, b, place) for name in ("key", "write", "gate"))
            keys, writes, decay = ring.fold_tokens(keys, writes, gates, kept, s.HV)
            refs.work.folded_keys[...], refs.work.folded_writes[...] = keys, writes
            refs.work.folded_decay[...] = jnp.broadcast_to(decay, refs.work.folded_decay.shape)
            some = tuning.largest_divisor(s.H, max(_FOLDED // s.group, 1))
            fold_some = functools.partial(_fold_heads, refs, s, (b, place), some, decay.shape[1])
            lax.fori_loop(jnp.int32(0), jnp.int32(s.H // some), fold_some, None)

        return carry

    # Most grid steps fold no ring.
    pl.when(functools.reduce(jnp.minimum, table.of_step(refs, table.PLACE, i)) < 0)(
        lambda: lax.fori_loop(jnp.int32(0), jnp.int32(n), fold, None)
    )


def _fold_heads(refs: DecodeRefs, s: DecodeStatic, at, some: int, channels: int, turn, carry) -> None:
    """Replace the states of `some` key heads in a buffer by the states after their ring."""
    tokens, before, scale_in = refs.work.folded_keys.shape[0] // s.HV, refs.buffers.before, refs.buffers.scale_in
    found = []
    for i, r in itertools.product(range(some), range(s.group)):
        key = turn * jnp.int32(some) + jnp.int32(i)
        h, row = key * jnp.int32(s.group) + jnp.int32(r), key + jnp.int32(r * s.H)
        decay = refs.work.folded_decay[pl.ds(row, 1), :]
        # A decay that all channels share stays one number, unless scales of channels multiply it.
        decay = decay[:, :channels] if scale_in is None else decay * scale_in[(*at, pl.ds(h, 1))]
        of_head = [reads.load_spaced(y, row, tokens, s.HV) for y in (refs.work.folded_keys, refs.work.folded_writes)]
        found.append((h, *ring.apply_ring(before[(*at, h)], *of_head, decay, refs.buffers.ring_write.dtype)))
    # All heads are read before one is written, so that their products may overlap.
    for h, S, scales in found:
        before[(*at, h)] = refs.buffers.after[(*at, h)] = S
        if scales is not None:
            scale_in[(*at, pl.ds(h, 1))] = refs.buffers.scale_out[(*at, pl.ds(h, 1))] = scales


def _run_sequences(refs: DecodeRefs, s: DecodeStatic, i) -> None:
    """Run the tokens of the sequences of grid step i."""
    starts = table.of_step(refs, table.START, i)
    if s.decode_tokens > 1:
        # Tokens that a sequence does not have are rows of zeros.
        none, tokens = jnp.int32(refs.tokens.o.shape[0]), table.of_step(refs, table.TOKENS, i)
        starts = [
            jnp.where(jnp.int32(t) < count, start + jnp.int32(t), none)
            for t in range(s.decode_tokens) for start, count in zip(starts, tokens, strict=True)
        ]  # fmt: skip
    _run_tokens(refs, s, i, starts)


def _run_in_turn(refs: DecodeRefs, s: DecodeStatic, i) -> None:
    """Run the sequences of grid step i token by token; in between their states are float32."""
    b, starts, tokens = copies.buffer_of(i), table.of_step(refs, table.START, i), table.of_step(refs, table.TOKENS, i)
    none, states = jnp.int32(refs.tokens.o.shape[0]), refs.work.between
    heads = list(itertools.product(range(states.shape[0]), range(s.HV)))
    for place, h in heads:
        S = refs.buffers.before[b, place, h].astype(jnp.float32)
        if refs.buffers.scale_in is not None:
            scales = refs.buffers.scale_in[b, place, h : h + 1]
            S = S * (scales if s.transposed else tiles.to_column(scales[None])[0])
        states[place, h] = S

    def store(turn):
        for place, h in heads:
            refs.buffers.after[b, place, h], scales = tile.stored(
                states[place, h], refs.buffers.after.dtype, s.transposed
            )
            if scales is not None:
                refs.buffers.scale_out[b, place, h : h + 1] = scales
        copies.copy_slots(refs, s, i, pools.start, out=True, turn=turn)

    def run(turn, carry):
        # A token that a sequence does not have is a row of zeros, after which its state is the same.
        _run_tokens(refs, s, i, [jnp.where(turn < n, x + turn, none) for x, n in zip(starts, tokens, strict=True)])
        if refs.targets > 1:
            store(turn)
            copies.copy_slots(refs, s, i, pools.wait, out=True, turn=turn)
        return carry

    lax.fori_loop(jnp.int32(0), functools.reduce(jnp.maximum, tokens), run, None)
    if refs.targets == 1:
        store(0)


def _run_tokens(refs: DecodeRefs, s: DecodeStatic, i, starts) -> None:
    """Run the tokens that the kernel takes at once, from their places in the stream."""
    b = copies.buffer_of(i)
    # How many tokens of its ring a sequence reads; its new token goes to this place.
    counts = [jnp.maximum(x, jnp.int32(0)) for x in table.of_step(refs, table.PLACE, i)] if refs.has_rings else None
    for place, start in enumerate(starts):
        refs.tokens.rows[place : place + 1, :] = refs.tokens.side_by_side[pl.ds(start, 1), :]
    q, k, v = _by_head(refs, s, b)
    # Copies start as early as possible, so that they overlap with the computation.
    store = functools.partial(copies.copy_slots, refs, s, i, pools.start, out=True)
    if refs.pools.conv:
        store("conv")
    if s.normalise:
        q, k = ([tiles.l2norm(x, functools.partial(tile.sum_of_head, s=s)) for x in heads] for heads in (q, k))
    q = [x * jnp.float32(s.scale) for x in q]
    gates, steps = _gates(refs, s)
    written = v if steps is None else [tile.over_lanes(x, s) * y for x, y in zip(steps, v, strict=True)]
    # Decays of channels have their lanes.
    spread = s.side_by_side > 1 and gates[0].shape[1] <= s.side_by_side
    to_lanes = lambda heads: [tile.over_lanes(x, s) for x in heads] if spread else heads
    gates = to_lanes(gates) if s.paired else gates
    decays = [jnp.exp(tile.accumulate(x, s)) for x in gates]
    if refs.has_rings:
        _append_keys(refs, s, b, counts, k, gates)
    beta = None if refs.tokens.beta is None else tile.step_size(refs.tokens.rows[:, refs.lanes["beta"]], s)
    # The erase key and the query of every value head.
    rows = [[_erase_key(refs, s, h, k), q[h // s.group]] for h in range(s.HV)]
    erased = [jnp.exp(tile.accumulate_before(x, s)) for x in gates] if s.erase_before_decay else decays
    reach = list(zip(*([erased, decays] if s.paired else map(to_lanes, (erased, decays))), strict=True))
    read = reads.read_states(refs, s, b, counts, rows, reach)
    since = to_lanes(gates) if s.decode_tokens > 1 and not s.paired else gates
    keys = [k, *_echo_keys(refs, s)]
    made, outputs = [], []
    for h in range(s.HV):
        size, (S_e, S_q) = None if beta is None else tile.over_lanes(_of_head(beta, h, s), s), read[h]
        mine, of_head = q[h // s.group], [x[h // s.group] for x in keys]
        new, o = tile.run_rule(mine, of_head, written[h], since[h], size, rows[h][0], S_e, S_q, s)
        if refs.work.skip is not None:
            o = o + tile.over_lanes(_of_head(refs.work.skip[...].astype(jnp.float32), h, s), s) * v[h]
        made.append(new)
        outputs.append(o)
    refs.work.made[...] = jnp.concatenate([x for of_key in zip(*made, strict=True) for x in of_key], axis=1)
    # The output replaces channels that have been read; there are more channels than outputs.
    o = jnp.concatenate(outputs, axis=1)
    o = o if _finishes_last(refs, s) else _finish(refs, s, o, _added(refs, s, q, k, v))
    refs.tokens.rows[:, : s.HV * s.V] = o
    for place, start in enumerate(starts):
        refs.tokens.outputs[pl.ds(start, 1), :] = refs.tokens.rows[place : place + 1, : s.HV * s.V]
    if refs.has_rings:
        made = [made[h][0] for h in tile.by_row(range(s.HV), s)]
        _store_tokens(refs.buffers.new_write, s, b, made)
    else:
        _update_states(refs, s, b, keys, decays if s.decode_tokens == 1 else [jnp.exp(x) for x in gates])
    if not s.loops:
        store(*refs.kinds[1:])


def _added(refs: DecodeRefs, s: DecodeStatic, q, k, v) -> jax.Array | None:
    """Return what is added to the norms of all heads [m, HV V]: the bias, and a token's own share of its value."""
    if refs.work.norm_bias is None:
        return None
    bias, shares = refs.work.norm_bias[...].astype(jnp.float32), []
    if refs.work.own is None:
        return bias
    own = refs.work.own[...].astype(jnp.float32)
    for h in range(s.HV):
        at = h // s.group
        weights = own[:, at * s.K : (at + 1) * s.K]
        shares.append(tile.sum_of_head(q[at] * k[at] * weights, s) * v[h])
    return bias + jnp.concatenate(shares, axis=1)


def _finish(refs: DecodeRefs, s: DecodeStatic, o: jax.Array, added: jax.Array | None) -> jax.Array:
    """Return the outputs of all heads [m, HV V] after the gate and the norm of the layer."""
    if refs.tokens.z is None:
        return o
    first, size = refs.lanes["z"].start, s.norm_heads * (s.V // s.side_by_side)
    found = []
    for at in range(0, o.shape[1], size):
        of_heads, weight = slice(at, at + size), None
        if s.eps is not None:
            shared = refs.work.norm.shape[1] == size
            weight = refs.work.norm[:, slice(0, size) if shared else of_heads].astype(jnp.float32)
        z = refs.tokens.rows[:, first + at : first + at + size]
        found.append(tile.norm_heads(o[:, of_heads], z, weight, None if added is None else added[:, of_heads], s))
    return jnp.concatenate(found, axis=1)


def _finishes_last(refs: DecodeRefs, s: DecodeStatic) -> bool:
    """Return whether the last grid step does the gate and the norm for all tokens, whose rows then fill registers.

    Narrow heads are many, so that a grid step takes few sequences.
    """
    return s.paired and s.norm_heads == 1 and not refs.work.w and refs.tokens.z is not None


def _finish_pairs(refs: DecodeRefs, s: DecodeStatic) -> None:
    """Replace the outputs of all tokens by those after the gate and the norm, pair by pair of the heads."""
    T, V, ends = refs.tokens.o.shape[0], s.V, refs.step.boundaries
    # Tokens of no decode stay zeros.
    row, last = lax.broadcasted_iota(jnp.int32, (T, V), 0), jnp.int32(ends.shape[0] - 1)
    count = jnp.clip(jnp.minimum(refs.step.decodes[0], refs.step.sequences[0]), jnp.int32(0), last)
    decoded = (row >= ends[0]) & (row < ends[count])

    def finish(pair, carry):
        lanes = lambda first: pl.ds(pl.multiple_of(pair * jnp.int32(V) + jnp.int32(first), V), V)
        of_tokens = lambda name: refs.tokens.side_by_side[:T, lanes(refs.lanes[name].start)]
        constant = lambda ref: ref[:, lanes(0)].astype(jnp.float32)
        weight = added = None
        if s.eps is not None:
            norm = refs.work.norm
            shared = norm.shape[1] < V
            weight = jnp.concatenate([norm[...].astype(jnp.float32)] * 2, axis=1) if shared else constant(norm)
        if refs.work.norm_bias is not None:
            added = constant(refs.work.norm_bias)
        if refs.work.own is not None:
            shares = of_tokens("x0") * of_tokens("x1") * constant(refs.work.own)
            added = added + tile.sum_of_head(shares, s) * of_tokens("x2")
        o, mean_of = refs.tokens.outputs[:T, lanes(0)], lambda x: tile.sum_of_head(x, s) * jnp.float32(2 / V)
        y = tile.norm_heads(o, of_tokens("z"), weight, added, s, mean_of)
        refs.tokens.outputs[:T, lanes(0)] = jnp.where(decoded, y, jnp.float32(0.0))
        return carry

    lax.fori_loop(jnp.int32(0), jnp.int32(s.HV), finish, None)


def _of_head(x: jax.Array, h: int, s: DecodeStatic) -> jax.Array:
    """Return the numbers of a head, [n, heads that lie side by side], of the numbers of all value heads."""
    return x[:, h * s.side_by_side : (h + 1) * s.side_by_side]


def _erase_key(refs: DecodeRefs, s: DecodeStatic, h: int, k: list[jax.Array]) -> jax.Array:
    """Return the erase keys of a value head, [m, K]."""
    if refs.tokens.p is None:
        return k[h // s.group]
    first = refs.lanes["p"].start + h * s.K
    return refs.tokens.rows[:, first : first + s.K]


def _echo_keys(refs: DecodeRefs, s: DecodeStatic) -> list[list[jax.Array]]:
    """Return the keys that write what erase keys read, a list of one [m, K] for every key head, or nothing."""
    if refs.tokens.echo is None:
        return []
    return [_key_heads(refs.tokens.rows[:, refs.lanes["echo"]], s)]


def _update_states(refs: DecodeRefs, s: DecodeStatic, b, keys, decays) -> None:
    """Store the states after each token of a grid step in the buffers from which they are copied out.

    The keys are those that write, one list of key heads or two. The decays are those of each token alone.
    """
    n, column = refs.buffers.before.shape[1], (lambda x: x) if s.transposed else lambda x: tiles.to_column(x[None])[0]
    for place in range(n):
        rows = [slice(row, row + 1) for row in range(place, refs.tokens.rows.shape[0], n)]
        for key in range(s.H):
            columns = [[column(x[key][row]) for x in keys] for row in rows]
            for h in range(key * s.group, (key + 1) * s.group):
                S, ends = refs.state(b, place, h).astype(jnp.float32), len(keys) * s.HV * s.V
                for t, (row, of_token) in enumerate(zip(rows, columns, strict=True)):
                    decay, at = decays[h][row], (b, place, *((t,) if refs.targets > 1 else ()))
                    if t == 0 and refs.buffers.scale_in is not None and not s.loops:
                        decay = decay * refs.buffers.scale_in[b, place, h : h + 1]
                    made = [refs.work.made[row, at : at + s.V] for at in range(h * s.V, ends, s.HV * s.V)]
                    S = tile.next_state(S, decay, of_token, made, s)
                    if s.loops:
                        refs.work.between[place, h] = S
                        continue
                    refs.buffers.after[(*at, h)], scales = tile.stored(S, refs.buffers.after.dtype, s.transposed)
                    if scales is not None:
                        refs.buffers.scale_out[(*at, slice(h, h + 1))] = scales


def _append_keys(refs: DecodeRefs, s: DecodeStatic, b, counts, k, gates) -> None:
    """Store the keys and gates of a grid step in the buffers from which they are copied to rings."""
    _store_tokens(refs.buffers.new_key, s, b, k)
    if refs.work.starts is not None:
        _store_tokens(refs.buffers.new_gate, s, b, tile.by_row(gates, s))
        return
    rows = tile.by_token(jnp.concatenate(tile.by_row(gates, s), axis=1), s)
    for place, at in enumerate(counts):
        refs.buffers.new_gate[b, place] = refs.buffers.ring_gate[b, place]
        for t, row in enumerate(rows):
            refs.buffers.new_gate[b, place, pl.ds(at + jnp.int32(t), 1), :] = row[place : place + 1]


def _store_tokens(buffer: jax.Ref, s: DecodeStatic, b, heads: list[jax.Array]) -> None:
    """Store heads [m, D] in a buffer of the tokens of all sequences, as rows of a token or in the order [R, H]."""
    for t, token in enumerate(zip(*(tile.by_token(x, s) for x in heads), strict=True)):
        at = (b, slice(None), t) if s.decode_tokens > 1 else (b, slice(None))
        if len(buffer.shape) == len(at) + 2:
            buffer[at] = jnp.stack(token, axis=1).astype(buffer.dtype)
            continue
        for r in range(buffer.shape[-3]):
            buffer[(*at, r)] = jnp.stack(token[r * s.H : (r + 1) * s.H], axis=1).astype(buffer.dtype)


def _by_head(refs: DecodeRefs, s: DecodeStatic, b) -> list[list[jax.Array]]:
    """Return queries, keys and values of every head after the convolution, [m, K] or [m, V] each."""
    arrays = [_channels(refs, s, b, j) for j in range(len(refs.tokens.x))]
    if len(arrays) == 1:
        keys = (arrays[0].shape[1] - s.HV * s.V) // 2
        arrays = [arrays[0][:, begin:end] for begin, end in itertools.pairwise([0, keys, 2 * keys, arrays[0].shape[1]])]
    q, k, v = arrays
    return [_key_heads(q, s), _key_heads(k, s), _cut(v, s.V)]


def _cut(x: jax.Array, size: int) -> list[jax.Array]:
    return [x[:, at : at + size] for at in range(0, x.shape[1], size)]


def _key_heads(x: jax.Array, s: DecodeStatic) -> list[jax.Array]:
    """Return queries or keys [m, H K] of every key head of the launch, [m, K]; for two heads in one their own ones."""
    if not s.paired or x.shape[1] == s.H * s.K:
        return _cut(x, s.K)
    heads = _cut(x, s.K // 2)
    of_value = [heads[h * len(heads) // (2 * s.HV)] for h in range(2 * s.HV)]
    return [jnp.concatenate(pair, axis=1) for pair in zip(of_value[::2], of_value[1::2], strict=True)]


def _channels(refs: DecodeRefs, s: DecodeStatic, b, j: int) -> jax.Array:
    """Return the channels of array j after the convolution, or without one after the activation, [m, channels]."""
    x = refs.tokens.rows[:, refs.lanes[f"x{j}"]]
    if not refs.work.w:
        return activations.activate(x, s.activation)
    first, biases = refs.lanes[f"x{j}"].start, refs.work.b
    weight = refs.work.taps[:, first : first + x.shape[1]]
    before, after = refs.buffers.conv_in[j], refs.buffers.conv_out[j]
    width, W = weight.shape[0], s.decode_tokens
    inputs = [*(before[b, :, t].astype(jnp.float32) for t in range(width - 1)), *tile.by_token(x, s)]
    for t in range(W):
        for i in range(width - 1):
            at = (b, slice(None), t, i) if W > 1 else (b, slice(None), i)
            after[at] = inputs[t + 1 + i].astype(after.dtype)
    taps = [jnp.concatenate(inputs[i : i + W]) for i in range(width)]
    bias = biases[j][...].astype(jnp.float32) if biases else None
    return tile.convolve(taps, weight, bias, s)


def _gates(refs: DecodeRefs, s: DecodeStatic) -> tuple[list[jax.Array], list[jax.Array] | None]:
    """Return the decays of every value head in nats, [m, 1], [m, K] or side by side [m, heads], and its time steps.

    Time steps are those of Mamba-2, otherwise None.
    """
    of_law = refs.work.A_log, refs.work.dt_bias
    A_log, dt_bias = (None if ref is None else ref[...].astype(jnp.float32) for ref in of_law)
    by_head = lambda x: [_of_head(x, h, s) for h in range(s.HV)]
    if refs.tokens.g is None:
        return by_head(jnp.broadcast_to(refs.work.gamma[...], (refs.tokens.rows.shape[0], s.gates))), None
    g = refs.tokens.rows[:, refs.lanes["g"]]
    if s.dt_limit is not None:
        assert A_log is not None
        assert dt_bias is not None
        steps = tile.time_steps(g, dt_bias, s)
        return by_head(gate_activation.decay_of_steps(steps, A_log)), by_head(steps)
    size = g.shape[1] // s.gates
    if size == 1:
        return by_head(tile.gate(g, A_log, dt_bias, s)), None
    size, each = size * s.side_by_side, s.side_by_side
    part: Callable[..., Any] = lambda x, h, size: None if x is None else x[:, h * size : (h + 1) * size]
    rate: Callable[..., Any] = lambda h: None if A_log is None else tile.over_lanes(part(A_log, h, each), s)
    return [tile.gate(part(g, h, size), rate(h), part(dt_bias, h, size), s) for h in range(s.HV)], None
