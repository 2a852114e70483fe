"""Decodes over a pool with rings, in one launch: a state is read once, and written only if its ring is folded.

A grid step takes a sequence. While it computes with `ring_tile`, the slot of the next sequence is copied in, and the
slots of earlier sequences are copied out, with four buffers in turn.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from chunkwise.shared import tuning
from chunkwise.shared.call.arguments import Arguments
from chunkwise.shared.kernels import launcher, layout, pools, tiles
from chunkwise.shared.serving import ring, ring_tile, state_pool
from chunkwise.shared.serving.decode.records import DecodeStatic
from chunkwise.shared.serving.state_pool import StatePool

# Buffers of slots: one is filled, one is in use, and the others are written out. With a power of two the buffer of a
# sequence is found without a division, which is slow.
_BUFFERS = 4
# This many grid steps after a sequence was computed, its copies have gone out.
LATER = _BUFFERS - 1
# A ring is copied in this many parts; parts that hold no token are left out.
_PARTS = 4
# How many key heads a fold takes at once.
_FOLDED = 4


class RingRefs(NamedTuple):
    """The Refs of the kernel: scalar tables, tokens, the pool in HBM, and buffers.

    Attributes:
      start, count: int32 [N], the first token of a sequence and its number of tokens.
      source, target: int32 [N], the slots that the sequence starts from and ends in; negative for none, and for
        sequences without tokens.
      kept: int32 [N], how many tokens of the source's ring are kept.
      folded: int32 [N], 1 if the ring is folded before the tokens of the sequence, and the state is written.
      q, k: [T, H, K]; v, o: [T, HV, V].
      g: float32 [T, HV] in the order [R, H], or [T, R, H, K].
      beta: float32 [T, HV] in the order [R, H], or None.
      p: float32 [T, R, H, K], erase keys, which the kernel does not normalise; None for k.
      states_out, scales_out, keys_out, writes_out, gates_out: the arrays of the pool, updated in place.
      state, scale_rows, key, write, gate: four buffers for the arrays of a slot, [4, ...].
      folded_keys: float32 [L R H, K], the keys of the ring times the decays after them.
      folded_writes: float32 [L R H, V], the writes of the ring.
      decay: float32 [R, H, K], the decay of the state over the ring.
      rows: float32 [HV, V], the values, and then the outputs, of a token.
      same_head, of_token: float32, the masks of `ring_tile`.
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
    same_head: jax.Ref
    of_token: jax.Ref
    reads: jax.Ref
    stores: jax.Ref
    beta: jax.Ref
    p: jax.Ref
    scales: jax.Ref
    scales_out: jax.Ref
    scale_rows: jax.Ref

    @property
    def per_channel(self) -> bool:
        """Whether gates are per channel."""
        return len(self.g.shape) == 4


def _ring_kernel(refs: RingRefs, s: DecodeStatic):
    n, N = pl.program_id(0), refs.count.shape[0]

    @pl.when(n == 0)
    def _():
        # The output of a token is zero if no sequence has the token.
        refs.o[...] = jnp.zeros_like(refs.o)
        L, H = refs.key.shape[1:3]
        refs.same_head[...], refs.of_token[...] = ring_tile.masks(s.W, L, H, refs.beta is not None)
        _reads(refs, n, pools.start)

    # The next sequence is read into a buffer whose last sequence has been written out. The last steps only wait.
    pl.when(n >= LATER)(lambda: _stores(refs, s, n - LATER, pools.wait))
    pl.when(n + 1 < N)(lambda: _reads(refs, n + 1, pools.start))

    @pl.when(n < N)
    def _():
        _reads(refs, n, pools.wait)
        pl.when(refs.count[n] > 0)(lambda: _run_sequence(refs, s, n, _buffer(n)))
        _stores(refs, s, n, pools.start)


def _run_sequence(refs: RingRefs, s: DecodeStatic, n, b) -> None:
    """Run the tokens of sequence n, whose slot is in buffer b."""
    folded = refs.folded[n] == 1

    @pl.when(refs.source[n] < 0)
    def _():
        refs.state[b] = jnp.zeros(refs.state.shape[1:], refs.state.dtype)
        if refs.scale_rows is not None:
            refs.scale_rows[b] = jnp.zeros(refs.scale_rows.shape[1:], jnp.float32)

    pl.when(folded)(lambda: _fold(refs, b, refs.kept[n]))
    first = jnp.where(folded, jnp.int32(0), refs.kept[n])
    # Tokens after the end of the sequence are computed, too, and dropped.
    place = [jnp.minimum(refs.start[n] + jnp.int32(t), jnp.int32(refs.v.shape[0] - 1)) for t in range(s.W)]
    q, k = ([ref[at].astype(jnp.float32) for at in place] for ref in (refs.q, refs.k))  # [H, K] each
    if s.normalise:
        q, k = ([tiles.l2norm(x) for x in y] for y in (q, k))
    # Gates per head, and step sizes, are rows.
    row = lambda i: i if refs.per_channel else pl.ds(i, 1)
    g = [refs.g[row(at)] for at in place]
    beta = None if refs.beta is None else [refs.beta[pl.ds(at, 1), :] for at in place]
    p = None if refs.p is None else [refs.p[at] for at in place]

    def values(at):
        refs.rows[...] = refs.v[at].astype(jnp.float32)
        return layout.load_every(refs.rows, refs.write.shape[2])

    o, written = ring_tile.decode(
        q, k, [values(at) for at in place], g, beta, p, _slot(refs, b, first), refs.same_head[...], refs.of_token[...],
        s.scale, s.erase_before_decay,
    )  # fmt: skip
    for t, at in enumerate(place):
        inside = first + jnp.int32(t)
        refs.key[b, inside] = k[t].astype(refs.key.dtype)
        refs.gate[b, row(inside)] = g[t]
        refs.write[b, inside] = jnp.stack(written[t]).astype(refs.write.dtype)
        layout.store_every(refs.rows, o[t])
        # The first token always exists.
        store = functools.partial(_store_output, refs, at)
        pl.when(jnp.int32(t) < refs.count[n])(store) if t else store()


def _slot(refs: RingRefs, b, count) -> StatePool:
    """Return the slot in buffer b, whose ring holds `count` tokens."""
    scales = None
    if refs.scale_rows is not None:
        scales = jnp.stack(layout.load_every(refs.scale_rows.at[b], refs.write.shape[2]))
    return StatePool(refs.state[b], scales, refs.key[b], refs.write[b], refs.gate[b], count)


def _store_output(refs: RingRefs, at) -> None:
    refs.o[at] = refs.rows[...].astype(refs.o.dtype)


def _fold(refs: RingRefs, b, kept) -> None:
    """Replace the state in buffer b by the state after the kept tokens of its ring, in the type of the pool."""
    keys, writes, decay = ring_tile.fold_tokens(_slot(refs, b, kept))
    R, L, H, K = keys.shape
    for r in range(R):
        for i in range(L):
            rows = pl.ds((i * R + r) * H, H)
            refs.folded_keys[rows, :], refs.folded_writes[rows, :] = keys[r, i], writes[r, i]
        refs.decay[r] = jnp.broadcast_to(decay[r], (H, K))
    some = tuning.largest_divisor(H, _FOLDED)

    def fold_head(h, r):
        n, tokens = h * jnp.int32(R) + jnp.int32(r), pl.ds(jnp.int32(r * H) + h, L, stride=R * H)
        row = refs.decay[r, pl.ds(h, 1), :]
        # A decay that all channels share stays one number, unless scales of channels multiply it.
        row = row[:, : decay[r].shape[1]] if refs.scale_rows is None else row * refs.scale_rows[b, pl.ds(n, 1), :]
        tokens = refs.folded_keys[tokens, :], refs.folded_writes[tokens, :]
        return n, *ring_tile.fold_head(refs.state[b, n], *tokens, row, refs.write.dtype)

    def fold_heads(turn, carry):
        # All heads are read before one is written, so that their products may overlap.
        heads = [(turn * jnp.int32(some) + jnp.int32(i), r) for i in range(some) for r in range(R)]
        for n, S, scales in [fold_head(*head) for head in heads]:
            refs.state[b, n] = S
            if scales is not None:
                refs.scale_rows[b, pl.ds(n, 1), :] = scales
        return carry

    lax.fori_loop(jnp.int32(0), jnp.int32(H // some), fold_heads, None)


def _buffer(n) -> jax.Array:
    """Return the buffer of sequence n."""
    return jnp.bitwise_and(n, jnp.int32(_BUFFERS - 1))


def _reads(refs: RingRefs, n, act) -> None:
    """Start the copies of the slot that sequence n reads, or wait for them: `act` is called with every copy."""
    slot, b = refs.source[n], _buffer(n)
    copy = lambda pool, buffer: act(pltpu.make_async_copy(pool, buffer, refs.reads.at[b]))

    @pl.when(slot >= 0)
    def _():
        copy(refs.states_out.at[slot], refs.state.at[b])
        if refs.scales_out is not None:
            copy(refs.scales_out.at[slot], refs.scale_rows.at[b])
        if not refs.per_channel:
            copy(refs.gates_out.at[slot], refs.gate.at[b])
        L = refs.key.shape[1]
        size = -(-L // _PARTS)
        for first in range(0, L, size):
            part = pl.ds(first, min(size, L - first))

            @pl.when(refs.kept[n] > first)
            def _(part=part):
                copy(refs.keys_out.at[slot, part], refs.key.at[b, part])
                copy(refs.writes_out.at[slot, part], refs.write.at[b, part])
                if refs.per_channel:
                    copy(refs.gates_out.at[slot, part], refs.gate.at[b, part])


def _stores(refs: RingRefs, s: DecodeStatic, n, act) -> None:
    """Start, or wait for, the copies of sequence n to its slot: its tokens, and its state if the ring was folded."""
    slot, b = refs.target[n], _buffer(n)
    copy = lambda buffer, pool: act(pltpu.make_async_copy(buffer, pool, refs.stores.at[b]))

    @pl.when(slot >= 0)
    def _():
        rows = pl.ds(jnp.where(refs.folded[n] == 1, jnp.int32(0), refs.kept[n]), s.W)
        copy(refs.key.at[b, rows], refs.keys_out.at[slot, rows])
        copy(refs.write.at[b, rows], refs.writes_out.at[slot, rows])
        if refs.per_channel:
            copy(refs.gate.at[b, rows], refs.gates_out.at[slot, rows])
        else:
            copy(refs.gate.at[b], refs.gates_out.at[slot])

        @pl.when(refs.folded[n] == 1)
        def _():
            copy(refs.state.at[b], refs.states_out.at[slot])
            if refs.scales_out is not None:
                copy(refs.scale_rows.at[b], refs.scales_out.at[slot])


def launch(
    static: DecodeStatic, x: Arguments, pool: StatePool, routes: pools.Routes, accepted: jax.Array | None
) -> tuple[jax.Array, StatePool]:
    """Run decodes over a pool with rings; `states_kernel.launch` documents the arguments and results.

    With `accepted`, int32 [N], so many tokens of the last decode of each slot are kept; None keeps all.
    """
    (T, H), L, per_channel = x.q.shape[1:3], pool.replay, x.g.ndim == 4
    (HV, K, V), N, delta = pool.shape[1:], routes.source.shape[0], x.beta is not None
    target = routes.target[:, 0]
    kept = state_pool.kept_tokens(pool, routes.source, accepted)
    folded = ring.folds(pool, routes.source, target, kept, static.W)
    tables = dict(
        start=routes.start, count=routes.end - routes.start, source=routes.source, target=target, kept=kept,
        folded=folded.astype(jnp.int32),
    )  # fmt: skip
    by_row = lambda y: jnp.swapaxes(y.reshape(T, H, HV // H, *y.shape[3:]), 1, 2)  # [T, R, H, ...]
    in_lanes = lambda y: by_row(y.astype(jnp.float32)).reshape(T, HV)
    tensors = dict(
        q=x.q[0], k=x.k[0], v=x.v[0], g=by_row(x.g) if per_channel else in_lanes(x.g),
        beta=in_lanes(x.beta) if delta else None, p=None if x.p is None else by_row(x.p),
    )  # fmt: skip
    names = [name for name in ("states", "scales", "keys", "writes", "gates") if getattr(pool, name) is not None]
    whole = lambda y: pl.BlockSpec(y.shape, lambda n, *_: (0,) * y.ndim, pipeline_mode=pl.Buffered(1))
    in_hbm = pl.BlockSpec(memory_space=pl.ANY)
    buffer = lambda y: pltpu.VMEM((_BUFFERS, *y.shape[1:]), y.dtype)
    scratch: dict[str, Any] = dict(state=buffer(pool.states))
    if pool.scales is not None:
        scratch["scale_rows"] = buffer(pool.scales)
    scratch |= dict(key=buffer(pool.keys), write=buffer(pool.writes), gate=buffer(pool.gates))
    scratch |= dict(folded_keys=(L * HV, K), folded_writes=(L * HV, V), decay=(HV // H, H, K), rows=(HV, V))
    scratch |= dict(same_head=((1 + delta) * static.W * H, L * H), of_token=(L, L * H))
    scratch |= {name: pltpu.SemaphoreType.DMA((_BUFFERS,)) for name in ("reads", "stores")}
    out = launcher.launch(
        functools.partial(_ring_kernel, s=static),
        RingRefs,
        name=static.name.replace("_fwd", "_ring_fwd"),
        grid=(N + LATER,),
        dimension_semantics=("arbitrary",),
        tables=tables,
        inputs={name: (y, None if y is None else whole(y)) for name, y in tensors.items()}
        | {name: (getattr(pool, name), in_hbm) for name in names},
        outputs={"o": (whole(tensors["v"]), tensors["v"].shape, x.v.dtype)}
        | {name: (in_hbm, getattr(pool, name).shape, getattr(pool, name).dtype) for name in names},
        scratch=scratch,
        in_place={name: name for name in names},
        cost_estimate=_cost(N, static.W, pool),
        # All slots exist, and all tokens lie in the ring.
        in_bounds=True,
    )
    rings = pool._replace(**{name: out[name] for name in names})
    return out["o"][None], ring.counted(rings, routes, kept, folded)


def _cost(N: int, W: int, pool: StatePool) -> pl.CostEstimate:
    """Return the cost of decodes: states are read, one of L / W sequences writes its state, and rings are half full."""
    size = lambda y: 0 if y is None else y.size // y.shape[0] * y.dtype.itemsize
    state, ring = size(pool.states) + size(pool.scales), size(pool.keys) + size(pool.writes) + size(pool.gates)
    (heads, K, V), L, written = pool.shape[1:], pool.replay, W / pool.replay
    return pl.CostEstimate(
        flops=round(N * heads * (4 * W * K * V + 4 * W * L * (K + V) + 2 * K * V * W)),
        transcendentals=N * W * L * heads * (K if pool.gates.ndim == 5 else 1),
        bytes_accessed=round(N * ((1 + written) * state + (0.5 + written) * ring)),
    )


def holds(x: Arguments, pool: StatePool) -> bool:
    """Return whether fast memory holds the buffers of slots and all tokens of x."""
    size = lambda y: 0 if y is None else y.size // y.shape[0] * y.dtype.itemsize
    slot = sum(size(y) for y in (pool.states, pool.scales, pool.keys, pool.writes, pool.gates))
    # If there are erase keys, all arrays of tokens are float32. Constant gates take little memory.
    arrays = (y for y in (x.q, x.k, x.v, x.v, x.g) if y is not None)
    tokens = sum(y.size * (4 if x.erases else max(y.dtype.itemsize, 2)) for y in arrays)
    tokens += x.erases * 4 * x.v.size // x.v.shape[3] * x.q.shape[3]
    return (_BUFFERS + 2) * slot + 2 * tokens <= tuning.VMEM_LIMIT_BYTES
