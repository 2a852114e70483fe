"""The same chunked computation in plain JAX, differentiable by JAX.

A packed batch without states keeps its chunks aligned to the token stream and masks the pairs of different sequences:
its cost follows tokens, not sequences. With states, chunks restart at every sequence, so that every sequence has a
chunk boundary where its state can be handed in and out. States are [V, K] here, as in the kernels.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from chunkwise.fused_gla import tile
from chunkwise.shared.compat import varying_zeros
from chunkwise.shared.kernels import Chunking, dot, stream_masks, token_owners
from chunkwise.shared.operators import Arguments, Options


def gla(x: Arguments, options: Options) -> tuple[jax.Array, jax.Array | None]:
    """Return (o, final states) for checked arguments in float32, g [B, T, HV] or [B, T, HV, K], states [N, HV, V, K].

    The chunks of all heads are one batch of tiles [NC * heads, C, D].
    """
    B, T, HV, _ = x.v.shape
    stream = x.cu_seqlens is not None and x.initial_state is None and not options.output_final_state
    chunks = Chunking(B, T, options.chunk_size, None if stream else x.cu_seqlens)
    # Without boundaries there is no stream.
    cu_seqlens: Any = x.cu_seqlens
    masks = stream_masks(T, options.chunk_size, cu_seqlens) if stream else None
    healthy = spoilt = None
    q, k, v, g = x.q, x.k, x.v, x.g
    if stream:
        # The products read every row of a chunk, and a mask that multiplies does not stop what is not finite.
        healthy, spoilt = _quarantine(x)
        q, k, v, g = (jnp.where(_tail(healthy, y), y, 0.0) for y in (q, k, v, g))
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
    o = dot(P.astype(v.dtype), v) + tile.read_state(q, _tiles(before), from_start)  # [NC HV, C, V]
    o = chunks.merge(o.reshape(chunks.NC, HV, *o.shape[1:])).astype(v.dtype)
    if spoilt is not None:
        o = _sealed(jnp.where(_tail(spoilt, o), jnp.nan, o), x, spoilt)
    if not options.output_final_state:
        return o, None
    last = chunks.final_chunk
    final = through[last] * before[last] + added[last]
    start = jnp.zeros((), jnp.float32) if x.initial_state is None else x.initial_state
    return o, jnp.where(chunks.empty[:, None, None, None], start, final)


def _not_finite(owner: jax.Array, N: int, *arrays: jax.Array) -> jax.Array:
    """Return the tokens of sequences, or padding, that hold something not finite in arrays [1, T, ...], bool [T]."""
    finite = (jnp.all(jnp.isfinite(y[0]), axis=tuple(range(1, y.ndim - 1))) for y in arrays)
    found = ~functools.reduce(jnp.logical_and, finite)
    return jnp.zeros((N + 1,), bool).at[owner].max(found)[owner]


def _owners(x: Arguments) -> jax.Array:
    """Return the sequence of every token of a stream, int32 [T]."""
    assert x.cu_seqlens is not None
    return token_owners(x.q.shape[1], x.cu_seqlens)


def _quarantine(x: Arguments) -> tuple[jax.Array, jax.Array]:
    """Return which tokens may enter products, and which are of sequences that hold something not finite, bool [T]."""
    owner, N = _owners(x), x.num_states
    bad = _not_finite(owner, N, x.q, x.k, x.v, x.g)
    return (owner < jnp.int32(N)) & ~bad, (owner < jnp.int32(N)) & bad


def _sealed(o: jax.Array, x: Arguments, spoilt: jax.Array) -> jax.Array:
    """Return o. If its cotangent is not finite in a sequence, the gradients of no other sequence see that.

    JAX has one linear function with a transpose of the caller's that all its transforms know: the solution of a linear
    system. Here the system is the identity.
    """
    owner, N = _owners(x), x.num_states
    same = lambda *y: y[-1]

    def transpose(_, do):
        return jnp.where(_tail(spoilt | _not_finite(owner, N, do), do), 0.0, do)

    o = lax.custom_linear_solve(same, o, same, transpose)
    # So that nothing is hidden: zero times a cotangent that is not finite is NaN in the gradient of the same token's v.
    return o + 0.0 * jnp.where(_tail(owner < jnp.int32(N), x.v), x.v, 0.0)


def _tail(tokens: jax.Array, x: jax.Array) -> jax.Array:
    """Return a value per token [T] so that it meets x [1, T, ...]."""
    return tokens.reshape(1, -1, *(1,) * (x.ndim - 2))


def _tiles(x: jax.Array) -> jax.Array:
    return x.reshape(-1, *x.shape[2:])


def _column(mask: jax.Array, heads: int) -> jax.Array:
    return jnp.repeat(mask, heads, axis=0)[:, :, None]


def _states(chunks: Chunking, added, through, initial_state) -> jax.Array:
    """Return the state before every chunk [NC, HV, V, K] from what chunks add to it and how it decays over them."""
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
