"""The operators in plain JAX, composed from the chunk functions of the stage packages.

A packed batch without states keeps its chunks aligned to the token stream and masks the pairs of different
sequences: its cost follows tokens, not sequences. With states, chunks restart at every sequence, so that every
sequence has a chunk boundary where its state can be handed in and out; the extra chunks cost about as much as the
states themselves.
"""

import jax
import jax.numpy as jnp
from jax import lax

from chunkwise.chunk_h.kernel import CONTINUE, make_table
from chunkwise.chunk_h.xla import states
from chunkwise.chunk_o.xla import output
from chunkwise.shared import Chunking, dot_nt, masked_exp, repeat_heads, split_gate, stream_masks, strictly_lower
from chunkwise.solve_tril.xla import inverse
from chunkwise.wy_fast.xla import w_u


def gated_delta_rule(q, k, v, g, beta, scale, initial_state, output_final_state, cu_seqlens, C):
    """Return (o, final_state) for checked arguments; final_state is None unless asked for."""
    B, T, _, _ = v.shape
    stream = cu_seqlens is not None and initial_state is None and not output_final_state
    chunks = Chunking(B, T, C, None if stream else cu_seqlens)
    masks = stream_masks(T, C, cu_seqlens) if stream else None
    q_c, k_c, v_c, beta_c = chunks.split(q), chunks.split(k), chunks.split(v), chunks.split_rows(beta)
    decay, from_start, to_end, through = _decays(chunks.split_rows(g), masks)

    def scores(rows):
        return decay * jax.vmap(lambda a, b: repeat_heads(dot_nt(a, b), v.shape[2]))(rows, k_c)

    A = jnp.swapaxes(beta_c, -1, -2) * scores(k_c)
    A_inv = inverse(A.reshape(-1, C, C)).reshape(A.shape)
    w, u = w_u(k_c, v_c, A_inv, beta_c, from_start)
    # A stream restarts nowhere: `through` is zero where another sequence begins.
    table = make_table(chunks.first, chunks.length, chunks.sequence)
    if stream:
        table = table._replace(action=jnp.full_like(table.action, CONTINUE))
    h, v_new, after = states(k_c, w, u, to_end, through, initial_state, table, B)
    o = chunks.merge(output(q_c, k_c, v_new, h, from_start, scores(q_c), scale)).astype(v.dtype)
    if stream:
        owned = jnp.arange(T) < cu_seqlens[-1]
        return jnp.where(owned[None, :, None, None], o, 0), None
    if not output_final_state:
        return o, None
    start = 0.0 if initial_state is None else initial_state.astype(jnp.float32)
    return o, jnp.where(chunks.empty[:, None, None, None], start, after[chunks.final_chunk])


def _decays(g, masks):
    """Return the decays of every chunk from the gates g, rows [NC, HV, 1, C].

    Returns:
      decay [NC, HV, C, C], from token j to token i > j of one sequence, else 0. The diagonal is left out: its 1 does
        not depend on the gates, and in their gradient it would swamp decays of 1e-13.
      from_start [NC, HV, C, 1], from the start of the chunk to each token, 0 for tokens of later sequences.
      to_end [NC, HV, C, 1], from each token to the end of the chunk, 0 for tokens of sequences that ended.
      through [NC, HV, 1, 1], over the whole chunk, 0 if another sequence begins in it.
    """
    below = strictly_lower(g.shape[-1])
    coarse, fine = (lax.cumsum(part, axis=3) for part in split_gate(g))
    from_start = jnp.exp(coarse + fine)
    # Summed from the end, not as a difference to the last row, where a decay of 1 would depend on gates that cancel.
    after = lax.cumsum(g, axis=3, reverse=True)[..., 1:]
    to_end = jnp.exp(jnp.pad(after, [(0, 0)] * 3 + [(0, 1)]))
    through = from_start[..., -1:]
    if masks is not None:
        below = below & masks.same[:, None]
        from_start = jnp.where(masks.carried[:, None, None], from_start, 0.0)
        to_end = jnp.where(masks.ending[:, None, None], to_end, 0.0)
        through = jnp.where(masks.through[:, None, None, None], through, 0.0)
    coarse, fine = (jnp.swapaxes(x, -1, -2) - x for x in (coarse, fine))
    return masked_exp(coarse + fine, below), *(jnp.swapaxes(x, -1, -2) for x in (from_start, to_end)), through
