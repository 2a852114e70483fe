"""The same chunked computation in plain JAX, differentiable by JAX.

A packed batch without states keeps its chunks aligned to the token stream and masks the pairs of different sequences:
its cost follows tokens, not sequences. With states, chunks restart at every sequence, so that every sequence has a
chunk boundary where its state can be handed in and out. States are [V, K] here, as in the kernels.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from chunkwise.fused_gla import tile
from chunkwise.shared import compat
from chunkwise.shared.call import arguments
from chunkwise.shared.kernels import chunking, matmul
from chunkwise.shared.plain import isolation


def gla(x: arguments.Arguments, options: arguments.Options) -> tuple[jax.Array, jax.Array | None, jax.Array]:
    """Return o, the final states if they are wanted, and the states before all chunks [NC, HV, V, K].

    Arguments are checked and float32, g is [B, T, HV] or [B, T, HV, K], states are [N, HV, V, K].
    The chunks of all heads are one batch of tiles [NC * heads, C, D].
    """
    B, T, HV, _ = x.v.shape
    stream = x.cu_seqlens is not None and x.initial_state is None and not options.output_final_state
    chunks = chunking.Chunking(B, T, options.chunk_size, None if stream else x.cu_seqlens)
    # Without boundaries there is no stream.
    cu_seqlens: Any = x.cu_seqlens
    masks = chunking.stream_masks(T, options.chunk_size, cu_seqlens) if stream else None
    nonfinite = None
    q, k, v, g = x.q, x.k, x.v, x.g
    if stream:
        nonfinite = isolation.nonfinite_tokens((q, k, v, g), cu_seqlens)
        q, k, v, g = (chunking.zero_padding(chunking.select_tokens(~nonfinite, y), cu_seqlens) for y in (q, k, v, g))
    rows = chunks.split(g) if g.ndim == 4 else chunks.split_rows(g)
    q, k, v, g = (_tiles(y) for y in (chunks.split(q), chunks.split(k), chunks.split(v), rows))  # [NC heads, C, D]
    same = None if masks is None else jnp.repeat(masks.same, HV, axis=0)  # [NC HV, C, C]
    decays = tile.decays(g, x.scale, same)
    _, from_start, to_end, through, _ = decays
    if masks is not None:
        from_start = jnp.where(_column(masks.carried, HV), from_start, 0.0)
        to_end = jnp.where(_column(masks.ending, HV), to_end, 0.0)
        through = jnp.where(_column(masks.through[:, None], HV), through, 0.0)

    # What every chunk adds to the state, and how it decays over it, [NC, HV, V or 1, K or 1]: a scan over chunks.
    added = tile.next_state(jnp.zeros((), jnp.float32), k, v, to_end, through)
    added, through = (y.reshape(chunks.NC, HV, *y.shape[1:]) for y in (added, through))
    before = _states(chunks, added, through, x.initial_state)  # [NC, HV, V, K]
    P = tile.scores(q, k, decays, same)  # [NC HV, C, C]
    o = matmul.dot(P.astype(v.dtype), v) + tile.read_state(q, _tiles(before), from_start)  # [NC HV, C, V]
    o = chunks.merge(o.reshape(chunks.NC, HV, *o.shape[1:])).astype(v.dtype)
    if nonfinite is not None:
        o = isolation.keep_apart(o, x.v, nonfinite, cu_seqlens)
    if not options.output_final_state:
        return o, None, before
    last = chunks.final_chunk
    final = through[last] * before[last] + added[last]
    start = jnp.zeros((), jnp.float32) if x.initial_state is None else x.initial_state
    return o, jnp.where(chunks.empty[:, None, None, None], start, final), before


def _tiles(x: jax.Array) -> jax.Array:
    return x.reshape(-1, *x.shape[2:])


def _column(mask: jax.Array, heads: int) -> jax.Array:
    return jnp.repeat(mask, heads, axis=0)[:, :, None]


def _states(chunks: chunking.Chunking, added, through, initial_state) -> jax.Array:
    """Return the state before every chunk [NC, HV, V, K] from what chunks add to it and how it decays over them."""
    by_time = lambda x: jnp.moveaxis(chunks.per_batch(x), 1, 0)
    restarts = chunks.packed and initial_state is not None
    zeros = compat.varying_zeros((chunks.B, *added.shape[1:]), added, through, initial_state)
    initial = zeros
    if initial_state is not None and not restarts:
        initial = zeros + jnp.asarray(initial_state)

    def step(S, x):
        added, through, first, sequence = x
        if chunks.packed:
            S = jnp.where(first[:, None, None, None], initial_state[sequence] if restarts else 0.0, S)
        return through * S + added, S

    xs = [by_time(x) for x in (added, through, chunks.first, chunks.sequence)]
    return _tiles(jnp.moveaxis(lax.scan(step, initial, tuple(xs))[1], 0, 1))
