"""The mathematics of taking the state through one chunk, and its gradient; arrays in, arrays out.

v_new = u - w S;  S' = e^{G_last} S + (k e^{G_last - G})^T v_new. Without w, v_new is u: plain linear attention.
"""

import jax
import jax.numpy as jnp
from jax import lax

from chunkwise.shared.kernels import gating, matmul, tiles


def last_valid(g_row: jax.Array) -> jax.Array:
    """Return the last entry of each cumulative row [heads, 1, C] as [heads, 1, 1].

    Padded rows have a gate of 0, so the last entry is equal to the entry of the last valid row.
    """
    size = g_row.shape[-1]
    lane = lax.broadcasted_iota(jnp.int32, (1, 1, size), 2)
    return jnp.sum(jnp.where(lane == size - 1, g_row, 0.0), axis=-1, keepdims=True)


def decays_tile(g):
    """Return the decay from each token to the end of the chunk, and the decay over the whole chunk.

    From rows [HV, 1, C]: [HV, C, 1] and [HV, 1, 1]. From gates per channel [HV, C, K]: [HV, C, K] and [HV, K, 1].
    """
    if gating.per_channel(g):
        g_last = g[:, -1:]  # [HV, 1, K]
        return jnp.exp(g_last - g), tiles.to_column(jnp.exp(g_last))
    g_last = last_valid(g)  # [HV, 1, 1]
    return jnp.exp(g_last - tiles.to_column(g)), jnp.exp(g_last)


def new_values_tile(S, w, u):
    """Return v_new = u - w S [HV, C, V] float32 from the state S [HV, K, V]; u itself if w is None."""
    u = u.astype(jnp.float32)
    return u if w is None else u - matmul.dot(w, S)


def next_state_tile(S, k, v_new, to_end, through):
    """Return the state after the chunk [HV, K, V].

    Args:
      S: [HV, K, V], the state before the chunk.
      k: [h, C, K], keys of the key heads.
      v_new: [HV, C, V] float32.
      to_end, through: from `decays_tile`.
    """
    k = tiles.repeat_heads(k, S.shape[0]).astype(jnp.float32)  # [HV, C, K]
    return through * S + matmul.dot_tn(k * to_end, v_new)


def state_bwd_tile(S, k, w, v_new, g, dS, dh, dv_new, end):
    """Return the gradients of one chunk: dk, dw (None without w), du, dg, and dS for the state before the chunk.

    With dS' the gradient of the state after the chunk and e the decay to its end:

        dv = dv_new + (e k) dS';  dk = e (v_new dS'^T);  dw = -dv S^T;  du = dv
        dS = dh + e^{G_last} dS' - w^T dv
        dG = -k dk, but on the last row the sum of k dk over all other rows, plus e^{G_last} S dS'

    Args:
      S: [HV, K, V], the state before the chunk.
      k: [h, C, K], keys of the key heads.
      w: [HV, C, K], or None.
      v_new: [HV, C, V].
      g: the gates.
      dS: [HV, K, V], the gradient of the state after the chunk.
      dh: [HV, K, V], the cotangent of h: the gradient from all other readers of the state before the chunk.
      dv_new: [HV, C, V], or None without w.
      end: as in `state_gate_gradient_tile`.
    """
    to_end, through = decays_tile(g)
    k = tiles.repeat_heads(k, S.shape[0]).astype(jnp.float32)  # [HV, C, K]
    dv = matmul.dot(k * to_end, dS)  # [HV, C, V]
    if dv_new is not None:
        dv += dv_new
    dk = to_end * matmul.dot_nt(v_new.astype(jnp.float32), dS)  # [HV, C, K]
    dg = state_gate_gradient_tile(k * dk, S * dS, through, g, end)
    before = through * dS + dh  # [HV, K, V]
    if w is None:
        return dk, None, dv, dg, before
    return dk, -matmul.dot_nt(dv, S), dv, dg, before - matmul.dot_tn(w.astype(jnp.float32), dv)


def state_gate_gradient_tile(kdk, SdS, through, g, end):
    """Return dG in the form of g.

    The key of the token at the end is not decayed, whatever the gates are. In exact arithmetic its k dk would be added
    and subtracted again; in float32 that would swamp terms of e^-30, so it is left out.

    Args:
      kdk: k * dk [HV, C, K].
      SdS: S * dS' [HV, K, V].
      through: the decay over the whole chunk, [HV, 1, 1] or [HV, K, 1].
      g: the gates.
      end: the row of the last token; a number beyond all rows means the last row of the chunk.
    """
    decayed, time = gating.gate_gradient(kdk, g), 1 if gating.per_channel(g) else 2  # [HV, C, K] or [HV, 1, C]
    at_end = lax.broadcasted_iota(jnp.int32, decayed.shape, time) == jnp.minimum(end, jnp.int32(kdk.shape[1] - 1))
    decayed = jnp.where(at_end, 0.0, decayed)
    last = through * jnp.sum(SdS, axis=2, keepdims=True)  # [HV, K, 1]
    last = (
        tiles.to_row(last) if gating.per_channel(g) else jnp.sum(last, axis=1, keepdims=True)
    )  # [HV, 1, K] or [HV, 1, 1]
    last += jnp.sum(decayed, axis=time, keepdims=True)
    return jnp.where(at_end, last, -decayed)
