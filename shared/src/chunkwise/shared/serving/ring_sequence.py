"""What a decode over a pool with a ring computes for one sequence, whose slot lies in a buffer.

`state_pool` has the equations, and `ring_kernel` says when. The matrix unit, which has time to spare, reads the state
and the ring as they were before the step. The rows of a product are the keys and queries of eight heads with the state
of one, or of all heads with the ring, and what a head reads of another one is dropped. What the few tokens of the step
read of one another are sums on the vector unit. HV = H R: value head n belongs to key head n // R, and lies in row
[n % R, n // R] of the arrays [R, H, ...].
"""

import functools
import itertools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from chunkwise.shared.kernels import launcher, matmul, packed, tiles
from chunkwise.shared.serving import state_pool

# Key heads of a fold that are worked on at once.
_FOLDED = 4
# Heads whose keys and queries are rows of one product: as many as a register has rows.
_ROWS = 8


class ReplayStatic(NamedTuple):
    """What is known when the program is built.

    Attributes:
      N, T: sequences, and tokens of all of them.
      W: the most tokens of a sequence.
      H, R, K, V: key heads, value heads for each of them, and channels.
      L: tokens of a ring.
      delta, per_channel: whether it is a delta rule, and whether gates are per channel.
      scale, normalise: as in `DecodeStatic`.
    """

    N: int
    T: int
    W: int
    H: int
    R: int
    K: int
    V: int
    L: int
    delta: bool
    per_channel: bool
    scale: float
    normalise: bool


class ReplayRefs(NamedTuple):
    """The Refs of the kernel: scalar tables, tokens, the pool in HBM, and buffers.

    Attributes:
      start, count: int32 [N], the first token of a sequence and how many it has.
      source, target: int32 [N], the slots that it starts from and ends in, negative for none, as without tokens.
      kept: int32 [N], tokens of the ring of the source that count.
      folded: int32 [N], 1 if the ring is folded, and the state written, before its tokens.
      q, k: [T, H, K]; v, o: [T, HV, V].
      g: float32 [T, HV] in the order [R, H], or [T, R, H, K].
      beta: float32 [T, HV] in the order [R, H], or None.
      p: float32 [T, R, H, K], erase keys as they are, or None for keys.
      states_out, scales_out, keys_out, writes_out, gates_out: the pool.
      state, scale_rows, key, write, gate: buffers of a slot, [4, ...].
      folded_keys: float32 [L R H, K], the keys of the ring times what decays after them.
      folded_writes: float32 [L R H, V].
      decay: float32 [R, H, K], what decays of the state.
      rows: float32 [HV, V], the values, and then the outputs, of a token.
      own: float32 [W H or 2 W H, L H], 1 where a query or key of a head meets that head's tokens of a ring, else 0.
      repeat: float32 [L, L H], 1 where a column is of that token, else 0.
      reads, stores: semaphores of the copies from and to a slot, [4].
    """

    start: jax.Ref
    count: jax.Ref
    source: jax.Ref
    target: jax.Ref
    kept: jax.Ref
    folded: jax.Ref
    q: jax.Ref
    k: jax.Ref
    v: jax.Ref
    g: jax.Ref
    states: jax.Ref
    keys: jax.Ref
    writes: jax.Ref
    gates: jax.Ref
    o: jax.Ref
    states_out: jax.Ref
    keys_out: jax.Ref
    writes_out: jax.Ref
    gates_out: jax.Ref
    state: jax.Ref
    key: jax.Ref
    write: jax.Ref
    gate: jax.Ref
    folded_keys: jax.Ref
    folded_writes: jax.Ref
    decay: jax.Ref
    rows: jax.Ref
    own: jax.Ref
    repeat: jax.Ref
    reads: jax.Ref
    stores: jax.Ref
    beta: jax.Ref
    p: jax.Ref
    scales: jax.Ref
    scales_out: jax.Ref
    scale_rows: jax.Ref


def run_sequence(refs: ReplayRefs, s: ReplayStatic, n, b) -> None:
    """Run the tokens of sequence n, whose slot is in buffer b."""
    folded = refs.folded[n] == 1

    @pl.when(refs.source[n] < 0)
    def _():
        refs.state[b] = jnp.zeros(refs.state.shape[1:], refs.state.dtype)
        if refs.scale_rows is not None:
            refs.scale_rows[b] = jnp.zeros(refs.scale_rows.shape[1:], jnp.float32)

    pl.when(folded)(lambda: _fold(refs, s, b, refs.kept[n]))
    first = jnp.where(folded, jnp.int32(0), refs.kept[n])
    # What is past the tokens of the sequence is computed too, and dropped.
    place = [jnp.minimum(refs.start[n] + jnp.int32(t), jnp.int32(s.T - 1)) for t in range(s.W)]
    q, k = ([ref[at].astype(jnp.float32) for at in place] for ref in (refs.q, refs.k))  # [H, K] each
    if s.normalise:
        q, k = ([tiles.l2norm(x) for x in y] for y in (q, k))
    g = [refs.g[at] if s.per_channel else refs.g[pl.ds(at, 1), :] for at in place]

    # The gates of the step up to a token, and after another one up to it.
    upto = list(itertools.accumulate(g, jnp.add))
    between = {(u, t): functools.reduce(jnp.add, g[u + 1 : t + 1]) for t in range(s.W) for u in range(t)}
    rows: dict[Any, jax.Array] = {("beta", t): refs.beta[pl.ds(at, 1), :] for t, at in enumerate(place) if s.delta}
    after, start = _decays(refs, s, b, first)
    if not s.per_channel:
        rows |= {"after": after, "start": start}
        rows |= {("upto", t): jnp.exp(x) for t, x in enumerate(upto)}
        rows |= {("between", *pair): jnp.exp(x) for pair, x in between.items()}
    columns = _turn(rows, s.H)
    # The keys that erase, of a delta rule, and the queries of all tokens read what was there before the step at once.
    erase = (
        [[x[r] for r in range(s.R)] for x in (refs.p[at] for at in place)]
        if refs.p is not None
        else [[x] * s.R for x in k]
    )
    met = [[*([x[r] for x in erase] if s.delta else []), *q] for r in range(s.R)]
    if s.per_channel:
        met = [[x * jnp.exp(upto[j % s.W][r]) for j, x in enumerate(y)] for r, y in enumerate(met)]
    before = _read_before(refs, s, b, first, met, after, start, columns)

    def read_step(x, r, t):
        """Return what x of token t reads of the tokens of the step before it."""
        found = jnp.zeros((s.H, s.V), jnp.float32)
        for u in range(t):
            decay = jnp.exp(between[u, t][r]) if s.per_channel else columns["between", u, t][r]
            found = found + jnp.sum(x * k[u] * decay, axis=-1, keepdims=True) * written[r][u]
        return found

    written: list[list[jax.Array]] = [[] for _ in range(s.R)]
    for t, at in enumerate(place):
        inside = first + jnp.int32(t)
        own = jnp.sum(q[t] * k[t], axis=-1, keepdims=True)  # [H, 1]
        refs.rows[...] = refs.v[at].astype(jnp.float32)
        for r in range(s.R):
            heads = pl.ds(r, s.H, stride=s.R)
            d = refs.rows[heads, :]  # [H, V]
            if s.delta:
                d = columns["beta", t][r] * (d - before[r][t] - read_step(erase[t][r], r, t))
            o = before[r][len(met[r]) - s.W + t] + read_step(q[t], r, t) + own * d
            refs.rows[heads, :] = s.scale * o
            refs.write[b, inside, r] = d.astype(refs.write.dtype)
            written[r].append(d)

        refs.key[b, inside] = k[t].astype(refs.key.dtype)
        if s.per_channel:
            refs.gate[b, inside] = g[t]
        else:
            refs.gate[b, pl.ds(inside, 1), :] = g[t]
        # The first token exists.
        store = functools.partial(_store_output, refs, at)
        pl.when(jnp.int32(t) < refs.count[n])(store) if t else store()


def _store_output(refs: ReplayRefs, at) -> None:
    refs.o[at] = refs.rows[...].astype(refs.o.dtype)


def fill_masks(refs: ReplayRefs, s: ReplayStatic) -> None:
    """Write what says which columns [L H] are of a head, and of a token."""
    row, column = (lax.broadcasted_iota(jnp.int32, refs.own.shape, i) for i in range(2))
    refs.own[...] = (lax.rem(row, jnp.int32(s.H)) == lax.rem(column, jnp.int32(s.H))).astype(jnp.float32)
    row, column = (lax.broadcasted_iota(jnp.int32, refs.repeat.shape, i) for i in range(2))
    refs.repeat[...] = (lax.div(column, jnp.int32(s.H)) == row).astype(jnp.float32)


def _read_before(
    refs: ReplayRefs, s: ReplayStatic, b, inside, met: list[list[jax.Array]], after, start, columns: dict[Any, Any]
) -> list[list[jax.Array]]:
    """Return what keys that erase, and queries, read of the state and of its ring, for every r [H, V] of each.

    Args:
      refs, s: of the kernel.
      b: the buffer of the slot.
      inside: how many tokens the ring holds.
      met: keys that erase, and queries, of all tokens, [H, K] each, for every r. With gates per channel they have
        decayed up to their tokens.
      after, start: what is left of the ring and of the state, of `_decays`.
      columns: other gates by head, of `_turn`.
    """
    of_state = [[x * start[r] for x in y] for r, y in enumerate(met)] if s.per_channel else met
    # The matrix unit takes products in this order: those with the states fill the time until the gates are turned.
    state = _meet_state(refs, s, b, of_state)
    ring = _meet_ring(refs, s, b, inside, met, after if s.per_channel else jnp.concatenate(columns["after"], axis=0))
    found = []
    for r in range(s.R):
        pairs = zip(state[r], ring[r], strict=True)
        if s.per_channel:
            found.append([x + y for x, y in pairs])
        else:
            start = columns["start"][r]
            found.append([columns["upto", j % s.W][r] * (start * x + y) for j, (x, y) in enumerate(pairs)])
    return found


def _meet_ring(
    refs: ReplayRefs, s: ReplayStatic, b, inside, met: list[list[jax.Array]], after
) -> list[list[jax.Array]]:
    """Return what keys that erase, and queries, read of the tokens of a ring, for every r [H, V] of each.

    All heads meet all keys of the ring in one product, and what they find of other heads becomes zero. Its columns
    [L H] are then the rows of a product with what was written.

    Args:
      refs, s: of the kernel.
      b: the buffer of the slot.
      inside: how many tokens the ring holds.
      met: keys that erase, and queries, [H, K] each, for every r.
      after: what is left of every token at the end of the ring, [R, H, K] each or in columns [HV, L].
    """
    parts, heads = _parts(refs.key), range(s.R)
    keys = [_kept(refs.key[b, i], i, inside) for i in range(s.L)]
    if s.per_channel:
        # What is left of a key is not exact.
        some = [_below([key.astype(jnp.float32) * x[r] for key, x in zip(keys, after, strict=True)]) for r in heads]
        right = [matmul.bf16_parts(x, parts) for x in some]
    else:
        right = [_exact_parts(_below(keys), refs.key.dtype)] * s.R
    # Without gates per channel and erase keys they are the same for every r.
    own = heads if s.per_channel or refs.p is not None else heads[:1]
    weights = [_product(matmul.bf16_parts(_below(met[r]), parts), right[r], matmul.dot_nt) for r in own]
    if not s.per_channel:
        repeat = (refs.repeat[...].astype(jnp.bfloat16)[None],)
        decays = _product(matmul.bf16_parts(after[None], parts), repeat)  # [HV, L H]
        by_head = [jnp.concatenate([decays[r * s.H : (r + 1) * s.H]] * len(met[0]), axis=0) for r in heads]
        weights = [weights[r % len(own)] * by_head[r] for r in heads]
    mask, found = refs.own[...] > 0, []
    for r, x in enumerate(weights):
        writes = _below([_kept(refs.write[b, i, r], i, inside) for i in range(s.L)])
        left = matmul.bf16_parts(jnp.where(mask, x, 0.0)[None], _parts(refs.write))
        y = _product(left, _exact_parts(writes, refs.write.dtype))
        found.append([y[i : i + s.H] for i in range(0, y.shape[0], s.H)])
    return found


def _kept(x: jax.Array, i: int, inside) -> jax.Array:
    """Return what a ring holds for token i, zeros if it is not one of those inside: it may hold anything then."""
    return lax.select(jnp.int32(i) < inside, x, jnp.zeros_like(x))


def _below(rows: list[jax.Array]) -> jax.Array:
    """Return matrices below one another, [1, rows, columns]."""
    return jnp.concatenate(rows, axis=0)[None]


def _decays(refs: ReplayRefs, s: ReplayStatic, b, inside) -> tuple[Any, jax.Array]:
    """Return how much of every token of a ring is left at its end, and how much of the state.

    They are [L, HV] and [1, HV], or per channel [R, H, K] of every token, and [R, H, K].
    """
    if s.per_channel:
        after, total = [], jnp.zeros((s.R, s.H, s.K), jnp.float32)
        for i in reversed(range(s.L)):
            after.insert(0, jnp.exp(total))
            total = total + _kept(refs.gate[b, i], i, inside)
        return after, jnp.exp(total)
    later = lambda x, n: jnp.concatenate([x[n:], jnp.zeros_like(x[:n])], axis=0)
    since = jnp.where(lax.broadcasted_iota(jnp.int32, (s.L, 1), 0) < inside, refs.gate[b], 0.0)
    n = 1
    while n < s.L:
        since, n = since + later(since, n), 2 * n
    return jnp.exp(later(since, 1)), jnp.exp(since[:1])


def _turn(rows: dict[Any, jax.Array], H: int) -> dict[Any, list[jax.Array]]:
    """Return rows [n, HV] as columns, [H, n] for every r, all of them by one transposition."""
    if not rows:
        return {}
    past = -sum(x.shape[0] for x in rows.values()) % _ROWS
    (_, HV), first, columns = next(iter(rows.values())).shape, 0, {}
    turned = jnp.concatenate([*rows.values(), jnp.zeros((past, HV), jnp.float32)], axis=0).T
    for name, x in rows.items():
        stop = first + x.shape[0]
        columns[name] = [turned[i : i + H, first:stop] for i in range(0, HV, H)]
        first = stop
    return columns


def _meet_state(refs: ReplayRefs, s: ReplayStatic, b, met: list[list[jax.Array]]) -> list[list[jax.Array]]:
    """Return what keys that erase, and queries, read of the states in a buffer, for every r [H, V] of each.

    Args:
      refs, s: of the kernel.
      b: the buffer of the slot.
      met: keys that erase, and queries, [H, K] each, for every r. With gates per channel they decay, not the states.
    """
    rows = _ROWS if s.H % _ROWS == 0 else s.H
    # Two states beside one another fill a matrix unit of 256 columns.
    wide = 2 if rows % 2 == 0 and s.V % 128 == 0 else 1
    heads = lax.broadcasted_iota(jnp.int32, (rows, 1), 0)
    found: list[Any] = []
    for group in range(0, s.H, rows):
        operands = []
        for r in range(s.R):
            some = [x[group : group + rows] for x in met[r]]
            if refs.scale_rows is not None:
                scales = refs.scale_rows[b, pl.ds(group * s.R + r, rows, stride=s.R), :]
                some = [x * scales for x in some]
            operands.append(matmul.bf16_parts(_below(some), _parts(refs.state)))
        total = [[jnp.zeros((rows, s.V), jnp.float32) for _ in met[0]] for _ in range(s.R)]
        for head in range(0, rows, wide):
            for r in range(s.R):
                beside = [refs.state[b, (group + head + i) * s.R + r] for i in range(wide)]
                states = _exact_parts(jnp.concatenate(beside, axis=1)[None], refs.state.dtype)
                y = _product(operands[r], states)
                for i, j in itertools.product(range(wide), range(len(total[r]))):
                    part = y[j * rows : (j + 1) * rows, i * s.V : (i + 1) * s.V]
                    total[r][j] = jnp.where(heads == head + i, part, total[r][j])
        found.append(total)
    return [[jnp.concatenate([x[r][j] for x in found], axis=0) for j in range(len(met[0]))] for r in range(s.R)]


def _parts(x) -> int:
    """Return how many bfloat16 parts a factor has that meets x: three if x is float32, which is as exact as it is."""
    return 3 if x.dtype == jnp.float32 else 2


def _exact_parts(x: jax.Array, dtype) -> tuple[jax.Array, ...]:
    """Return x, whose numbers are of this type, in bfloat16 parts whose sum it is: one for int8 and bfloat16."""
    return matmul.bf16_parts(x) if dtype == jnp.float32 else (x.astype(jnp.bfloat16),)


def _product(left: tuple[jax.Array, ...], right: tuple[jax.Array, ...], dot=matmul.dot) -> jax.Array:
    """Return the product of matrices [1, m, k] and [1, k, n] in parts, [m, n], without what is past the first bits.

    The parts of the left factor that meet one of the right lie below one another. `dot` may be that of a transposed
    factor.
    """
    products, m = [], left[0].shape[1]
    for j, part in enumerate(right):
        some = left[: len(left) - j]
        y = dot(packed.concat_rows(some), part, jnp.bfloat16)[0]
        products += [y[i * m : (i + 1) * m] for i in range(len(some))]
    return functools.reduce(jnp.add, products[::-1])


def _fold(refs: ReplayRefs, s: ReplayStatic, b, kept) -> None:
    """Make the state in a buffer that after the kept tokens of its ring, in the type of the pool."""
    mask = lax.broadcasted_iota(jnp.int32, (s.L, 1, 1), 0) < kept
    after, start = _decays(refs, s, b, kept)
    columns = {} if s.per_channel else _turn({"after": after, "start": start}, s.H)
    keys = jnp.where(mask, refs.key[b].astype(jnp.float32), 0.0)
    for r in range(s.R):
        if s.per_channel:
            rate, left = start[r], keys * jnp.stack([x[r] for x in after])
        else:
            rate, by_token = columns["start"][r], columns["after"][r]
            left = keys * jnp.stack([by_token[:, i : i + 1] for i in range(s.L)])
        writes = jnp.where(mask, refs.write[b, :, r].astype(jnp.float32), 0.0)
        for i in range(s.L):
            rows = pl.ds((i * s.R + r) * s.H, s.H)
            refs.folded_keys[rows, :], refs.folded_writes[rows, :] = left[i], writes[i]
        refs.decay[r] = jnp.broadcast_to(rate, (s.H, s.K))

    some = launcher.largest_divisor(s.H, _FOLDED)

    def fold_heads(turn, carry):
        # All are read before one is written, so that their products may overlap.
        heads = [(turn * jnp.int32(some) + jnp.int32(i), r) for i in range(some) for r in range(s.R)]
        for n, S, scales in [_fold_head(refs, s, b, *head) for head in heads]:
            refs.state[b, n] = S
            if refs.scale_rows is not None:
                refs.scale_rows[b, pl.ds(n, 1), :] = scales
        return carry

    lax.fori_loop(jnp.int32(0), jnp.int32(s.H // some), fold_heads, None)


def _fold_head(refs: ReplayRefs, s: ReplayStatic, b, h, r) -> tuple[Any, jax.Array, Any]:
    """Return a value head, its state with its ring as the pool keeps it, and its scales [1, K] or None."""
    n = h * jnp.int32(s.R) + jnp.int32(r)
    tokens = pl.ds(jnp.int32(r * s.H) + h, s.L, stride=s.R * s.H)
    keys, writes = refs.folded_keys[tokens, :][None], refs.folded_writes[tokens, :][None]
    row = refs.decay[r, pl.ds(h, 1), :]
    if refs.scale_rows is not None:
        row = row * refs.scale_rows[b, pl.ds(n, 1), :]
    same = not s.per_channel and refs.scale_rows is None
    decay = row[:, :1] if same else tiles.to_column(row[None])[0]
    # The parts of keys and of writes that are multiplied lie below one another, in one product.
    left, right = matmul.bf16_parts(keys, _parts(refs.write)), _exact_parts(writes, refs.write.dtype)
    pairs = [(i, j) for j in range(len(right)) for i in range(len(left) - j)]
    keys, writes = (packed.concat_rows(x) for x in ([left[i] for i, _ in pairs], [right[j] for _, j in pairs]))
    S = decay * refs.state[b, n].astype(jnp.float32) + matmul.dot_tn(keys, writes, jnp.bfloat16)[0]
    if refs.scale_rows is None:
        return n, S.astype(refs.state.dtype), None
    S, scales = state_pool.quantize(S)
    return n, S.astype(refs.state.dtype), tiles.to_row(scales[None])[0]
