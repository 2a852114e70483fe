"""The gated delta rule in plain JAX, composed from the tile functions of the stage packages.

One scan over chunks does everything of a chunk while it is in cache: its time is that of the products. The backward
computes the chunks again instead of keeping what is inside them.

A packed batch without states keeps its chunks aligned to the token stream and masks the pairs of different
sequences: its cost follows tokens, not sequences. With states, chunks restart at every sequence, so that every
sequence has a chunk boundary where its state can be handed in and out.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax

from chunkwise.chunk_h.kernel import next_state_tile
from chunkwise.chunk_o.kernel import output_tile
from chunkwise.shared import (
    Chunking,
    dot,
    dot_nt,
    masked_exp,
    repeat_heads,
    split_gate,
    stream_masks,
    strictly_lower,
    to_column,
    varying_zeros,
)
from chunkwise.solve_tril.xla import inverse

# Products inside a chunk cost C per token, steps of the scan 1 / C: on CPUs 16 and 128 were slower than 32, 64 equal.
_MOST_ROWS = 32


def gated_delta_rule(q, k, v, g, beta, scale, initial_state, output_final_state, cu_seqlens, C):
    """Return (o, final_state) for checked arguments; final_state is None unless asked for."""
    (B, T, HV, V), K, C = v.shape, k.shape[-1], min(C, _MOST_ROWS)
    stream = cu_seqlens is not None and initial_state is None and not output_final_state
    chunks = Chunking(B, T, C, None if stream else cu_seqlens)
    masks = stream_masks(T, C, cu_seqlens) if stream else None
    h0 = None if initial_state is None else initial_state.astype(jnp.float32)

    # One axis for batch and tokens: an axis of size 1 between others makes XLA copy what a loop reads.
    def by_time(x):
        return jnp.moveaxis(chunks.spread(x).reshape(B, -1, C, *x.shape[2:]), 1, 0).reshape(-1, B * C, *x.shape[2:])

    # Heads come first inside the scan only, where a chunk is in cache.
    def heads(x):
        return jnp.moveaxis(x.reshape(B, C, *x.shape[1:]), 2, 1).reshape(-1, C, *x.shape[2:])

    @functools.partial(jax.checkpoint, prevent_cse=False)
    def step(S, x):
        tokens, masks, first, sequence = x
        if chunks.packed:
            S = jnp.where(first, 0.0 if h0 is None else h0[sequence], S)
        if stream:
            # Padding may hold anything, and products read every row of a chunk.
            tokens = [jnp.where(masks.valid.reshape(C, *(1,) * (x.ndim - 1)), x, 0) for x in tokens]
        q, k, v, g, beta = (heads(x) for x in tokens)
        S, o = _chunk(S, q, k, v, g.astype(jnp.float32)[:, None], beta.astype(jnp.float32)[:, None], scale, masks)
        o = jnp.moveaxis(o.reshape(B, HV, C, V), 1, 2).reshape(B * C, HV, V).astype(v.dtype)
        return S, (o, S if chunks.packed and output_final_state else None)

    start = varying_zeros((B * HV, K, V), q, k, v, g, beta, initial_state)
    if h0 is not None and not chunks.packed:
        start += h0.reshape(start.shape)
    tokens = [by_time(x) for x in (q, k, v, g, beta)]
    first, sequence = (chunks.per_batch(x)[0] for x in (chunks.first, chunks.sequence))
    S, (o, after) = lax.scan(step, start, jax.tree.map(_keep_loop, (tokens, masks, first, sequence)))
    o = o[: chunks.NC // B].reshape(-1, B, C, HV, V)
    o = chunks.gather(jnp.moveaxis(o, 1, 0).reshape(B, -1, HV, V))
    if stream:
        owned = jnp.arange(T) < cu_seqlens[-1]
        return jnp.where(owned[None, :, None, None], o, 0), None
    if not output_final_state:
        return o, None
    if not chunks.packed:
        return o, S.reshape(B, HV, K, V)
    return o, jnp.where(chunks.empty[:, None, None, None], 0.0 if h0 is None else h0, after[chunks.final_chunk])


def _keep_loop(x):
    """Return operands of a scan, of two steps at least.

    A loop of one step is unrolled, and the CPU backend of XLA (jax 0.10 to 0.12) then fuses the products of all stages
    into one operation that computes garbage. A second chunk, of zeros, keeps the loop.
    """
    return x if x.shape[0] > 1 else jnp.concatenate([x, jnp.zeros_like(x)])


def _chunk(S, q, k, v, g, beta, scale, masks):
    """Return the state after a chunk and its output, from the state S [HV, K, V] before it.

    The new values are A_inv (beta (v - e^G k S)), which is u - w S with one product less.

    Args:
      q, k, v: [h, C, K], [h, C, K], [HV, C, V].
      g, beta: rows [HV, 1, C].
      scale: multiplies the output.
      masks: of the chunk, where it may hold several sequences.
    """
    HV, beta = v.shape[0], to_column(beta)
    decay, from_start, to_end, through = _decays(g, masks)
    scores = lambda rows: decay * repeat_heads(dot_nt(rows, k), HV)
    A_inv = inverse(beta * scores(k))
    v_new = dot(A_inv, beta * (v - dot(repeat_heads(k, HV) * from_start, S)))
    o = output_tile(q, k, v_new, S, from_start, scores(q), scale)
    return next_state_tile(S, k, v_new, to_end, through), o


def _decays(g, masks):
    """Return the decays of a chunk from its gates g, rows [HV, 1, C].

    Returns:
      decay [HV, C, C], from token j to token i > j of one sequence, else 0. The diagonal is left out: its 1 does
        not depend on the gates, and in their gradient it would swamp decays of 1e-13.
      from_start [HV, C, 1], from the start of the chunk to each token, 0 for tokens of later sequences.
      to_end [HV, C, 1], from each token to the end of the chunk, 0 for tokens of sequences that ended.
      through [HV, 1, 1], over the whole chunk, 0 if another sequence begins in it.
    """
    below = strictly_lower(g.shape[-1])
    coarse, fine = (lax.cumsum(part, axis=2) for part in split_gate(g))
    from_start = jnp.exp(coarse + fine)
    # Summed from the end, not as a difference to the last row, where a decay of 1 would depend on gates that cancel.
    after = lax.cumsum(g, axis=2, reverse=True)[..., 1:]
    to_end = jnp.exp(jnp.pad(after, [(0, 0), (0, 0), (0, 1)]))
    through = from_start[..., -1:]
    if masks is not None:
        below = below & masks.same
        from_start = jnp.where(masks.carried, from_start, 0.0)
        to_end = jnp.where(masks.ending, to_end, 0.0)
        through = jnp.where(masks.through, through, 0.0)
    coarse, fine = (jnp.swapaxes(x, -1, -2) - x for x in (coarse, fine))
    return masked_exp(coarse + fine, below), *(jnp.swapaxes(x, -1, -2) for x in (from_start, to_end)), through
