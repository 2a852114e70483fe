"""Decode over a pool with a ring, in one launch: a state is read once, and written only where its ring is folded.

A grid step takes a sequence: while it computes what `ring_sequence` says, the copies of the next one come in, and
those of the ones before go out, to and from four buffers in turn.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from chunkwise.shared import chips
from chunkwise.shared.call.arguments import Arguments
from chunkwise.shared.kernels import launcher, pools
from chunkwise.shared.serving import ring, state_pool
from chunkwise.shared.serving.decode_kernel import DecodeStatic
from chunkwise.shared.serving.ring_sequence import ReplayRefs, ReplayStatic, fill_masks, run_sequence
from chunkwise.shared.serving.state_pool import StatePool

# Buffers of a slot: one is read into, one is worked on, and others are written from. For a power of two the buffer of a
# sequence takes no division, which is slow.
_BUFFERS = 4
# The copies of a sequence have gone out so many grid steps after its own.
LATER = _BUFFERS - 1
# Tokens of the ring are copied in so many parts, of which those are left out that hold no token.
_PARTS = 4


def _replay_kernel(refs: ReplayRefs, s: ReplayStatic):
    n = pl.program_id(0)

    @pl.when(n == 0)
    def _():
        # Tokens of no sequence are zero.
        refs.o[...] = jnp.zeros_like(refs.o)
        fill_masks(refs, s)
        _reads(refs, s, n, _start)

    # The next sequence is read into a buffer that another one has been written from. The last steps only wait.
    pl.when(n >= LATER)(lambda: _stores(refs, s, n - LATER, _wait))
    pl.when(n + 1 < s.N)(lambda: _reads(refs, s, n + 1, _start))

    @pl.when(n < s.N)
    def _():
        _reads(refs, s, n, _wait)
        pl.when(refs.count[n] > 0)(lambda: run_sequence(refs, s, n, _buffer(n)))
        _stores(refs, s, n, _start)


def _buffer(n) -> jax.Array:
    """Return the buffer of sequence n."""
    return jnp.bitwise_and(n, jnp.int32(_BUFFERS - 1))


def _reads(refs: ReplayRefs, s: ReplayStatic, n, act) -> None:
    """Start, or wait for, the copies of what sequence n reads; `act` takes a copy."""
    slot, b = refs.source[n], _buffer(n)
    copy = lambda pool, buffer: act(pltpu.make_async_copy(pool, buffer, refs.reads.at[b]))

    @pl.when(slot >= 0)
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
    slot, b = refs.target[n], _buffer(n)
    copy = lambda buffer, pool: act(pltpu.make_async_copy(buffer, pool, refs.stores.at[b]))

    @pl.when(slot >= 0)
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


def launch(
    static: DecodeStatic, x: Arguments, pool: StatePool, routes: pools.Routes, accepted: jax.Array | None
) -> tuple[jax.Array, StatePool]:
    """Run decodes over a pool with a ring; as `decode_kernel.launch`, but for a pool that has a ring.

    Raises:
      NotImplementedError: the tokens and the buffers of a slot do not fit into VMEM.
    """
    if not fits(x, pool):
        raise NotImplementedError(
            f'"fused" takes a few tokens per sequence; {static.T} tokens and {_BUFFERS} slots of states '
            f'{pool.shape[1:]} with rings of {pool.replay} do not fit into VMEM: use implementation="xla".'
        )
    T, H, HV, K, V, L = static.T, static.H, static.HV, static.K, static.V, pool.replay
    R, per_channel = HV // H, x.g.ndim == 4
    s = ReplayStatic(
        static.N, T, static.W, H, R, K, V, L, x.beta is not None, per_channel, static.scale, static.normalise
    )
    target = routes.target[:, 0]
    kept = state_pool.kept_tokens(pool, routes.source, accepted)
    folded = ring.folds(pool, routes.source, target, kept, s.W)
    tables = dict(
        start=routes.start, count=routes.end - routes.start, source=routes.source, target=target, kept=kept,
        folded=folded.astype(jnp.int32),
    )  # fmt: skip
    by_row = lambda y: jnp.swapaxes(y.reshape(T, H, R, *y.shape[3:]), 1, 2)  # [T, R, H, ...]
    in_lanes = lambda y: by_row(y.astype(jnp.float32)).reshape(T, HV)
    tensors = dict(
        q=x.q[0], k=x.k[0], v=x.v[0], g=by_row(x.g) if per_channel else in_lanes(x.g),
        beta=None if x.beta is None else in_lanes(x.beta), p=None if x.p is None else by_row(x.p),
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
    scratch |= dict(own=((1 + s.delta) * s.W * H, L * H), repeat=(L, L * H))
    scratch |= {name: pltpu.SemaphoreType.DMA((_BUFFERS,)) for name in ("reads", "stores")}
    out = launcher.launch(
        functools.partial(_replay_kernel, s=s),
        ReplayRefs,
        name=static.name.replace("_fwd", "_replay_fwd"),
        grid=(s.N + LATER,),
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
    rings = pool._replace(**{name: out[name] for name in names})
    return out["o"][None], ring.counted(rings, routes, kept, folded)


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
    # With erase keys all tokens are float32. Gates that are constant take little.
    arrays = (y for y in (x.q, x.k, x.v, x.v, x.g) if y is not None)
    tokens = sum(y.size * (4 if x.erases else max(y.dtype.itemsize, 2)) for y in arrays)
    tokens += x.erases * 4 * x.v.size // x.v.shape[3] * x.q.shape[3]
    return (_BUFFERS + 2) * slot + 2 * tokens <= chips.VMEM_LIMIT_BYTES
