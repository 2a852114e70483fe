"""Decode over a pool with a ring, in one launch: a state is read once, and written only where its ring is folded.

`state_pool` has the equations. A grid step takes a sequence: while it computes, the copies of the next one come in, and
those of the ones before go out, to and from three buffers in turn. The state of a head meets the keys and queries of
all tokens of its sequence, and of eight heads, as the rows of one product, whose rows of other heads are dropped. The
tokens of the ring are sums on the vector unit. HV = H R: value head n belongs to key head n // R, and lies in row
[n % R, n // R] of the arrays [R, H, ...].
"""

import dataclasses
import functools
import itertools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from chunkwise.shared import chips
from chunkwise.shared.kernels import launcher, matmul, packed, pools, tiles
from chunkwise.shared.operators import state_pool
from chunkwise.shared.operators.arguments import Arguments
from chunkwise.shared.operators.decode import DecodeStatic
from chunkwise.shared.operators.state_pool import StatePool

# Buffers of a slot: one is read into, one is worked on, one is written from.
_BUFFERS = 3
# Tokens of the ring are copied in so many parts, of which those are left out that hold no token.
_PARTS = 4
# Tokens of the ring that are worked on at once.
_TOKENS = 8
# Key heads of a fold that are worked on at once.
_FOLDED = 4
# Heads whose keys and queries are rows of one product: those of a register.
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
      source, target: int32 [N], the slots that it starts from and ends in, negative for none.
      kept: int32 [N], tokens of the ring of the source that count.
      folded: int32 [N], 1 if the ring is folded, and the state written, before its tokens.
      q, k: [T, H, K]; v, o: [T, HV, V].
      g: float32 [T, HV] in the order [R, H], or [T, R, H, K].
      beta: float32 [T, HV] likewise, or None.
      states_out, scales_out, keys_out, writes_out, gates_out: the pool.
      state, scale_rows, key, write, gate: buffers of a slot, [3, ...].
      folded_keys: float32 [L R H, K], the keys of the ring times what decays after them.
      folded_writes: float32 [L R H, V].
      decay: float32 [R, H, K], what decays of the state.
      rows: float32 [HV, V], the values, and then the outputs, of a token.
      reads, stores: semaphores of the copies from and to a slot, [3].
    """

    start: Any
    count: Any
    source: Any
    target: Any
    kept: Any
    folded: Any
    q: Any
    k: Any
    v: Any
    g: Any
    states: Any
    keys: Any
    writes: Any
    gates: Any
    o: Any
    states_out: Any
    keys_out: Any
    writes_out: Any
    gates_out: Any
    state: Any
    key: Any
    write: Any
    gate: Any
    folded_keys: Any
    folded_writes: Any
    decay: Any
    rows: Any
    reads: Any
    stores: Any
    beta: Any = None
    scales: Any = None
    scales_out: Any = None
    scale_rows: Any = None


def _reads(refs: ReplayRefs, s: ReplayStatic, n, act) -> None:
    """Start, or wait for, the copies of what sequence n reads; `act` takes a copy."""
    slot, b = refs.source[n], lax.rem(n, jnp.int32(_BUFFERS))
    copy = lambda pool, buffer: act(pltpu.make_async_copy(pool, buffer, refs.reads.at[b]))

    @pl.when((refs.count[n] > 0) & (slot >= 0))
    def _():
        copy(refs.states_out.at[slot], refs.state.at[b])
        if refs.scales_out is not None:
            copy(refs.scales_out.at[slot], refs.scale_rows.at[b])
        if not s.per_channel:
            copy(refs.gates_out.at[slot], refs.gate.at[b])
        size = -(-s.L // _PARTS)
        for first in range(0, s.L, size):
            part = pl.ds(first, min(size, s.L - first))

            @pl.when(refs.kept[n] > first)
            def _(part=part):
                copy(refs.keys_out.at[slot, part], refs.key.at[b, part])
                copy(refs.writes_out.at[slot, part], refs.write.at[b, part])
                if s.per_channel:
                    copy(refs.gates_out.at[slot, part], refs.gate.at[b, part])


def _stores(refs: ReplayRefs, s: ReplayStatic, n, act) -> None:
    """Start, or wait for, the copies of what sequence n writes: its tokens, and its state if the ring was folded."""
    slot, b = refs.target[n], lax.rem(n, jnp.int32(_BUFFERS))
    copy = lambda buffer, pool: act(pltpu.make_async_copy(buffer, pool, refs.stores.at[b]))

    @pl.when((refs.count[n] > 0) & (slot >= 0))
    def _():
        rows = pl.ds(jnp.where(refs.folded[n] == 1, jnp.int32(0), refs.kept[n]), s.W)
        copy(refs.key.at[b, rows], refs.keys_out.at[slot, rows])
        copy(refs.write.at[b, rows], refs.writes_out.at[slot, rows])
        if s.per_channel:
            copy(refs.gate.at[b, rows], refs.gates_out.at[slot, rows])
        else:
            copy(refs.gate.at[b], refs.gates_out.at[slot])

        @pl.when(refs.folded[n] == 1)
        def _():
            copy(refs.state.at[b], refs.states_out.at[slot])
            if refs.scales_out is not None:
                copy(refs.scale_rows.at[b], refs.scales_out.at[slot])


def _start(copy) -> None:
    copy.start()


def _wait(copy) -> None:
    copy.wait()


def _replay_kernel(refs: ReplayRefs, s: ReplayStatic):
    n = pl.program_id(0)

    @pl.when(n == 0)
    def _():
        # Tokens of no sequence are zero.
        refs.o[...] = jnp.zeros_like(refs.o)
        _reads(refs, s, n, _start)

    # The next sequence is read into the buffer of the one before the last, which must have been written.
    pl.when(n >= 2)(lambda: _stores(refs, s, n - 2, _wait))
    pl.when(n + 1 < s.N)(lambda: _reads(refs, s, n + 1, _start))
    _reads(refs, s, n, _wait)
    pl.when(refs.count[n] > 0)(lambda: _sequence(refs, s, n))
    _stores(refs, s, n, _start)

    @pl.when(n == s.N - 1)
    def _():
        pl.when(n >= 1)(lambda: _stores(refs, s, n - 1, _wait))
        _stores(refs, s, n, _wait)


def _sequence(refs: ReplayRefs, s: ReplayStatic, n) -> None:
    """Run the tokens of a sequence."""
    b, folded = lax.rem(n, jnp.int32(_BUFFERS)), refs.folded[n] == 1

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
    kS, qS = _meet_state(refs, s, b, q, k, _sums(_gates(refs, s, b, first), g) if s.per_channel else None)
    for t, at in enumerate(place):
        inside = first + jnp.int32(t)
        after, total = _decays(_gates(refs, s, b, inside), g[t])
        step_sizes = refs.beta[pl.ds(at, 1), :] if s.delta else None
        start, decay, beta = _by_head(s, after, total, step_sizes)
        ring_k, ring_q = _meet_ring(refs, s, b, inside, q[t], k[t], decay)
        own = jnp.sum(q[t] * k[t], axis=-1, keepdims=True)  # [H, 1]
        refs.rows[...] = refs.v[at].astype(jnp.float32)
        for r in range(s.R):
            heads = pl.ds(r, s.H, stride=s.R)
            d = refs.rows[heads, :]  # [H, V]
            if s.delta:
                d = beta[r] * (d - start[r] * kS[t][r] - ring_k[r])
            refs.rows[heads, :] = s.scale * (start[r] * qS[t][r] + ring_q[r] + own * d)
            refs.write[b, inside, r] = d.astype(refs.write.dtype)

        # The first token exists.
        store = functools.partial(_store_output, refs, at)
        pl.when(jnp.int32(t) < refs.count[n])(store) if t else store()
        refs.key[b, inside] = k[t].astype(refs.key.dtype)
        if s.per_channel:
            refs.gate[b, inside] = g[t]
        else:
            refs.gate[b, pl.ds(inside, 1), :] = g[t]


def _store_output(refs: ReplayRefs, at) -> None:
    refs.o[at] = refs.rows[...].astype(refs.o.dtype)


def _meet_ring(refs: ReplayRefs, s: ReplayStatic, b, inside, q, k, decay) -> tuple[list[Any], list[Any]]:
    """Return what the tokens of a ring add for a key and for a query [H, K]: for every r, [H, V] each.

    Some tokens at a time, so that little is in registers at once.
    """
    ring_k, ring_q = ([jnp.zeros((s.H, s.V), jnp.float32)] * s.R for _ in range(2))
    some = launcher.largest_divisor(s.L, _TOKENS)
    for i in range(0, s.L, some):
        within = lax.broadcasted_iota(jnp.int32, (some, 1, 1), 0) < inside - jnp.int32(i)
        key = jnp.where(within, refs.key[b, i : i + some].astype(jnp.float32), 0.0)  # [some, H, K]
        by_head = () if s.per_channel else (k, q)
        scores = [jnp.sum(key * x[None], axis=-1, keepdims=True) for x in by_head]  # [some, H, 1]
        for r in range(s.R):
            left = jnp.stack(decay[r][i : i + some])
            if s.per_channel:
                met = key * left
                by_k, by_q = (jnp.sum(met * x[None], axis=-1, keepdims=True) for x in (k, q))
            else:
                by_k, by_q = (x * left for x in scores)
            write = jnp.where(within, refs.write[b, i : i + some, r].astype(jnp.float32), 0.0)  # [some, H, V]
            if s.delta:
                ring_k[r] = ring_k[r] + jnp.sum(by_k * write, axis=0)
            ring_q[r] = ring_q[r] + jnp.sum(by_q * write, axis=0)
    return ring_k, ring_q


def _gates(refs: ReplayRefs, s: ReplayStatic, b, inside) -> list[jax.Array]:
    """Return the gates of the tokens of a ring, [1, HV] or [R, H, K] each, zeros past those inside."""
    row = lambda i: refs.gate[b, i] if s.per_channel else refs.gate[b, i : i + 1, :]
    return [jnp.where(jnp.int32(i) < inside, row(i), 0.0) for i in range(s.L)]


def _sums(gates: list[jax.Array], g: list[jax.Array]) -> list[jax.Array]:
    """Return the sum of the gates of a ring and of the tokens up to every one of g."""
    total, sums = functools.reduce(jnp.add, gates), []
    for each in g:
        total = total + each
        sums.append(total)
    return sums


def _decays(gates: list[jax.Array], g: jax.Array) -> tuple[list[jax.Array], jax.Array]:
    """Return how much of every token of a ring is left at a token of gate g, and how much of the state."""
    after: list[Any] = [None] * len(gates)
    total = g
    for i in reversed(range(len(gates))):
        after[i] = jnp.exp(total)
        total = total + gates[i]
    return after, jnp.exp(total)


def _by_head(
    s: ReplayStatic, after: list[jax.Array], total: jax.Array, beta: jax.Array | None
) -> tuple[list[Any], list[Any], Any]:
    """Return, for every r, what is left of the state, and of the ring, and the step sizes, to multiply [H, ...] rows.

    Gates per channel have met the state already. The others and the step sizes lie in lanes: one transposition brings
    them into columns.
    """
    rows = [] if s.per_channel else [*after, total]
    rows = rows if beta is None else [*rows, beta]
    columns: list[Any] = []
    if rows:
        filled = [*rows, *[jnp.zeros_like(rows[0])] * (-len(rows) % _ROWS)]
        turned = jnp.concatenate(filled, axis=0).T  # [HV, rows]
        columns = [[turned[r * s.H : (r + 1) * s.H, i : i + 1] for i in range(len(rows))] for r in range(s.R)]
    if s.per_channel:
        start, decay = [1.0] * s.R, [[x[r] for x in after] for r in range(s.R)]
    else:
        start, decay = [x[s.L] for x in columns], [x[: s.L] for x in columns]
    return start, decay, None if beta is None else [x[-1] for x in columns]


def _meet_state(refs: ReplayRefs, s: ReplayStatic, b, q, k, sums) -> tuple[list[Any], list[Any]]:
    """Return the keys and queries of all tokens times the states: for every token and r, [H, V] each.

    Args:
      refs, s: of the kernel.
      b: the buffer of the slot.
      q, k: [H, K] of every token.
      sums: gates per channel up to every token, [R, H, K], which the queries and keys take instead of the states.
    """
    rows = _ROWS if s.H % _ROWS == 0 else s.H
    # Two states beside one another fill a matrix unit of 256 columns.
    wide = 2 if rows % 2 == 0 and s.V % 128 == 0 else 1
    met = (k, q) if s.delta else (q,)
    heads = lax.broadcasted_iota(jnp.int32, (rows, 1), 0)
    found: list[Any] = []
    for group in range(0, s.H, rows):
        operands = []
        for r in range(s.R):
            factor = [None] * s.W if sums is None else [jnp.exp(x[r]) for x in sums]
            if refs.scale_rows is not None:
                scales = refs.scale_rows[b, pl.ds(group * s.R + r, rows, stride=s.R), :]
                own = [None if x is None else x[group : group + rows] for x in factor]
                factor = [scales if x is None else scales * x for x in own]
            else:
                factor = [None if x is None else x[group : group + rows] for x in factor]
            parts = [x[t][group : group + rows] for x in met for t in range(s.W)]
            parts = [x if f is None else x * f for x, f in zip(parts, factor * len(met), strict=True)]
            left = jnp.concatenate(parts, axis=0)  # [len(met) W rows, K]
            operands.append(matmul.bf16_parts(left[None], _parts(refs.state)))
        total = [[jnp.zeros((rows, s.V), jnp.float32) for _ in range(len(met) * s.W)] for _ in range(s.R)]
        for head in range(0, rows, wide):
            for r in range(s.R):
                beside = [refs.state[b, (group + head + i) * s.R + r] for i in range(wide)]
                states = _exact_parts(jnp.concatenate(beside, axis=1)[None], refs.state.dtype)
                products = [_below(operands[r], j, part) for j, part in enumerate(states)]
                y = functools.reduce(jnp.add, products[::-1])
                for i, j in itertools.product(range(wide), range(len(total[r]))):
                    part = y[j * rows : (j + 1) * rows, i * s.V : (i + 1) * s.V]
                    total[r][j] = jnp.where(heads == head + i, part, total[r][j])
        found.append(total)
    whole = lambda i, t: [jnp.concatenate([x[r][i * s.W + t] for x in found], axis=0) for r in range(s.R)]
    kS: list[Any] = [whole(0, t) for t in range(s.W)] if s.delta else [None] * s.W
    return kS, [whole(len(met) - 1, t) for t in range(s.W)]


def _parts(x) -> int:
    """Return how many bfloat16 parts a factor has that meets x: three if x is float32, which is as exact as it is."""
    return 3 if x.dtype == jnp.float32 else 2


def _exact_parts(x: jax.Array, dtype) -> tuple[jax.Array, ...]:
    """Return x, whose numbers are of this type, in bfloat16 parts whose sum it is: one for int8 and bfloat16."""
    return matmul.bf16_parts(x) if dtype == jnp.float32 else (x.astype(jnp.bfloat16),)


def _below(left: tuple[jax.Array, ...], j: int, part: jax.Array) -> jax.Array:
    """Return left times the j-th part [1, K, V] of states, without products past the bits of the first ones."""
    m, some = left[0].shape[1], left[: len(left) - j]
    y = matmul.dot(packed.concat_rows(some), part, jnp.bfloat16)[0]
    return functools.reduce(jnp.add, [y[i * m : (i + 1) * m] for i in range(len(some))][::-1])


def _fold(refs: ReplayRefs, s: ReplayStatic, b, kept) -> None:
    """Make the state in a buffer that after the kept tokens of its ring, in the type of the pool."""
    mask = lax.broadcasted_iota(jnp.int32, (s.L, 1, 1), 0) < kept
    gates = _gates(refs, s, b, kept)
    start, decay, _ = _by_head(s, *_decays(gates, jnp.zeros_like(gates[0])), None)
    keys = jnp.where(mask, refs.key[b].astype(jnp.float32), 0.0)
    if s.per_channel:
        start = jnp.exp(functools.reduce(jnp.add, gates))
    for r in range(s.R):
        left = keys * jnp.stack(decay[r])
        writes = jnp.where(mask, refs.write[b, :, r].astype(jnp.float32), 0.0)
        for i in range(s.L):
            rows = pl.ds((i * s.R + r) * s.H, s.H)
            refs.folded_keys[rows, :], refs.folded_writes[rows, :] = left[i], writes[i]
        refs.decay[r] = jnp.broadcast_to(start[r], (s.H, s.K))

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
    # The parts of the keys that meet those of the writes lie below one another, in one product.
    left, right = matmul.bf16_parts(keys, _parts(refs.write)), _exact_parts(writes, refs.write.dtype)
    pairs = [(i, j) for j in range(len(right)) for i in range(len(left) - j)]
    keys, writes = (packed.concat_rows(x) for x in ([left[i] for i, _ in pairs], [right[j] for _, j in pairs]))
    S = decay * refs.state[b, n].astype(jnp.float32) + matmul.dot_tn(keys, writes, jnp.bfloat16)[0]
    if refs.scale_rows is None:
        return n, S.astype(refs.state.dtype), None
    S, scales = state_pool.quantize_columns(S)
    return n, S.astype(refs.state.dtype), tiles.to_row(scales[None])[0]


def launch(
    static: DecodeStatic, x: Arguments, pool: StatePool, routes: pools.Routes, accepted: jax.Array | None
) -> tuple[jax.Array, StatePool]:
    """Run decodes over a pool with a ring; as `decode.launch_tokens`, but for a pool that has a ring.

    Raises:
      NotImplementedError: the tokens and the buffers of a slot do not fit into VMEM.
    """
    if not fits(x, pool):
        raise NotImplementedError(
            f'"fused" takes a few tokens per sequence; {static.T} tokens and three slots of states {pool.shape[1:]} '
            f'with rings of {pool.replay} do not fit into VMEM: use implementation="xla".'
        )
    T, H, HV, K, V, L = static.T, static.H, static.HV, static.K, static.V, pool.replay
    R, per_channel = HV // H, x.g.ndim == 4
    s = ReplayStatic(
        static.N, T, static.W, H, R, K, V, L, x.beta is not None, per_channel, static.scale, static.normalise
    )
    target = routes.target[:, 0]
    kept = state_pool.kept_tokens(pool, routes.source, accepted)
    folded = state_pool.folds(pool, routes.source, target, kept, s.W)
    tables = dict(
        start=routes.start, count=routes.end - routes.start, source=routes.source, target=target, kept=kept,
        folded=folded.astype(jnp.int32),
    )  # fmt: skip
    by_row = lambda y: jnp.swapaxes(y.reshape(T, H, R, *y.shape[3:]), 1, 2)  # [T, R, H, ...]
    in_lanes = lambda y: by_row(y.astype(jnp.float32)).reshape(T, HV)
    tensors = dict(
        q=x.q[0], k=x.k[0], v=x.v[0], g=by_row(x.g) if per_channel else in_lanes(x.g),
        beta=None if x.beta is None else in_lanes(x.beta),
    )  # fmt: skip
    names = [name for name in ("states", "scales", "keys", "writes", "gates") if getattr(pool, name) is not None]
    whole = lambda y: pl.BlockSpec(y.shape, lambda n, *_: (0,) * y.ndim, pipeline_mode=pl.Buffered(1))
    in_hbm = pl.BlockSpec(memory_space=pl.ANY)
    buffer = lambda y: pltpu.VMEM((_BUFFERS, *y.shape[1:]), y.dtype)
    scratch: dict[str, Any] = dict(state=buffer(pool.states))
    if pool.scales is not None:
        scratch["scale_rows"] = buffer(pool.scales)
    scratch |= dict(key=buffer(pool.keys), write=buffer(pool.writes), gate=buffer(pool.gates))
    scratch |= dict(folded_keys=(L * HV, K), folded_writes=(L * HV, V), decay=(R, H, K), rows=(HV, V))
    scratch |= {name: pltpu.SemaphoreType.DMA((_BUFFERS,)) for name in ("reads", "stores")}
    out = launcher.launch(
        functools.partial(_replay_kernel, s=s),
        ReplayRefs,
        name=static.name.replace("_fwd", "_replay_fwd"),
        grid=(s.N,),
        dimension_semantics=("arbitrary",),
        tables=tables,
        inputs={name: (y, None if y is None else whole(y)) for name, y in tensors.items()}
        | {name: (getattr(pool, name), in_hbm) for name in names},
        outputs={"o": (whole(tensors["v"]), tensors["v"].shape, x.v.dtype)}
        | {name: (in_hbm, getattr(pool, name).shape, getattr(pool, name).dtype) for name in names},
        scratch=scratch,
        in_place={name: name for name in names},
        cost_estimate=replay_cost(s, pool),
        # Slots are those that exist, and tokens lie in the ring.
        in_bounds=True,
    )
    rings = dataclasses.replace(pool, **{name: out[name] for name in names})
    return out["o"][None], state_pool.counted(rings, routes, kept, folded)


def replay_cost(s: ReplayStatic, pool: StatePool) -> pl.CostEstimate:
    """Return what decodes cost: a state is read once, and written by one of L / W sequences; rings are half full."""
    size = lambda y: 0 if y is None else y.size // y.shape[0] * y.dtype.itemsize
    state, ring = size(pool.states) + size(pool.scales), size(pool.keys) + size(pool.writes) + size(pool.gates)
    heads, written = s.H * s.R, s.W / s.L
    return pl.CostEstimate(
        flops=round(s.N * heads * (4 * s.W * s.K * s.V + 4 * s.W * s.L * (s.K + s.V) + 2 * s.K * s.V * s.W)),
        transcendentals=s.N * s.W * s.L * heads * (s.K if s.per_channel else 1),
        bytes_accessed=round(s.N * ((1 + written) * state + (0.5 + written) * ring)),
    )


def fits(x: Arguments, pool: StatePool) -> bool:
    """Return whether the buffers of a slot and all tokens of x fit into fast memory."""
    size = lambda y: 0 if y is None else y.size // y.shape[0] * y.dtype.itemsize
    slot = sum(size(y) for y in (pool.states, pool.scales, pool.keys, pool.writes, pool.gates))
    tokens = sum(y.size * max(y.dtype.itemsize, 2) for y in (x.q, x.k, x.v, x.v, x.g))
    return (_BUFFERS + 2) * slot + 2 * tokens <= chips.VMEM_LIMIT_BYTES
