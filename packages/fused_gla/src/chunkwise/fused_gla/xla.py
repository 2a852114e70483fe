"""The same chunked computation in plain JAX, differentiable by JAX.

A packed batch without states keeps its chunks aligned to the token stream and masks the pairs of different sequences:
its cost follows tokens, not sequences. With states, chunks restart at every sequence, so that every sequence has a
chunk boundary where its state can be handed in and out.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from chunkwise.fused_gla import tiles
from chunkwise.shared.compat import varying_zeros
from chunkwise.shared.kernels import Chunking, dot, stream_masks, zero_padding


def gla(q, k, v, g, scale, initial_state, output_final_state, cu_seqlens, C):
    """Return (o, final_state) for checked arguments; g [B, T, H] or [B, T, H, K] float32 in nats.

    The chunks of all heads are one batch of tiles [NC * H, C, D].
    """
    B, T, H, _ = q.shape
    stream = cu_seqlens is not None and initial_state is None and not output_final_state
    chunks = Chunking(B, T, C, None if stream else cu_seqlens)
    masks = stream_masks(T, C, cu_seqlens) if stream else None
    if stream:
        # Padding may hold anything, and the products read every row of a chunk.
        q, k, v, g = (zero_padding(x, cu_seqlens) for x in (q, k, v, g))
    rows = chunks.split(g) if g.ndim == 4 else chunks.split_rows(g)
    q, k, v, g = (_tiles(x) for x in (chunks.split(q), chunks.split(k), chunks.split(v), rows))
    same = None if masks is None else jnp.repeat(masks.same, H, axis=0)
    decays = tiles.decays(g, scale, same)
    _, from_start, to_end, through, _ = decays
    if masks is not None:
        from_start = jnp.where(_column(masks.carried, H), from_start, 0.0)
        to_end = jnp.where(_column(masks.ending, H), to_end, 0.0)
        through = jnp.where(_column(masks.through[:, None], H), through, 0.0)

    added = tiles.next_state(jnp.zeros((), jnp.float32), k, v, to_end, through)
    added, through = (x.reshape(chunks.NC, H, *x.shape[1:]) for x in (added, through))
    before = _states(chunks, added, through, initial_state)
    P = tiles.scores(q, k, decays, same)
    o = dot(P.astype(v.dtype), v) + tiles.read_state(q, _tiles(before), from_start)
    o = chunks.merge(o.reshape(chunks.NC, H, *o.shape[1:])).astype(v.dtype)
    if not output_final_state:
        return o, None
    last = chunks.final_chunk
    final = through[last] * before[last] + added[last]
    start = 0.0 if initial_state is None else initial_state
    return o, jnp.where(chunks.empty[:, None, None, None], start, final)


def _tiles(x: jax.Array) -> jax.Array:
    return x.reshape(-1, *x.shape[2:])


def _column(mask: jax.Array, H: int) -> jax.Array:
    return jnp.repeat(mask, H, axis=0)[:, :, None]


def _states(chunks: Chunking, added, through, initial_state: Any) -> jax.Array:
    """Return the state before every chunk [NC, H, V, K] from what chunks add to it and how it decays over them."""
    by_time = lambda x: jnp.moveaxis(chunks.per_batch(x), 1, 0)
    restarts = chunks.packed and initial_state is not None
    zeros = varying_zeros((chunks.B, *added.shape[1:]), added, through, initial_state)
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
