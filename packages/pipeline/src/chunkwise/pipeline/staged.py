"""The operators as chains of stage kernels: the readable form, and the cross-check of the fused kernels."""

import functools
from typing import Any

import jax

from chunkwise.chunk_h import chunk_fwd_h, chunk_gated_delta_rule_fwd_h
from chunkwise.chunk_o import chunk_fwd_o
from chunkwise.cumsum import chunk_local_cumsum
from chunkwise.kkt import chunk_scaled_dot_kkt
from chunkwise.shared.kernels import clip_gate
from chunkwise.shared.operators import unit_rows
from chunkwise.solve_tril import solve_tril
from chunkwise.wy_fast import recompute_w_u

_PALLAS: dict[str, Any] = {"implementation": "pallas"}


@functools.partial(jax.jit, static_argnums=(8, 9, 10))
def delta_rule(q, k, v, g, beta, scale, initial_state, cu_seqlens, output_final_state, normalise, C):
    """Gated delta rule for gates per head g [B, T, HV], Kimi delta attention for gates per channel [B, T, HV, K]."""
    q, k = (unit_rows(x, normalise, cu_seqlens) for x in (q, k))
    g_cum = chunk_local_cumsum(clip_gate(g), C, cu_seqlens=cu_seqlens, **_PALLAS)
    A = chunk_scaled_dot_kkt(k, beta, g_cum, cu_seqlens, C, **_PALLAS)
    A_inv = solve_tril(A, cu_seqlens, **_PALLAS)
    w, u = recompute_w_u(k, v, beta, A_inv, g_cum, cu_seqlens, **_PALLAS)
    h, v_new, final_state = chunk_gated_delta_rule_fwd_h(
        k, w, u, g_cum, initial_state, output_final_state, cu_seqlens, C, **_PALLAS
    )
    o = chunk_fwd_o(q, k, v_new, h, g_cum, None, scale, cu_seqlens, C, **_PALLAS)
    return o.astype(v.dtype), final_state


@functools.partial(jax.jit, static_argnums=(8, 9))
def gla(q, k, v, g, g_gamma, scale, initial_state, cu_seqlens, output_final_state, C):
    """Gated linear attention for gates per head [B, T, H], constant per head [H], or per channel [B, T, H, K]."""
    g_gamma = None if g_gamma is None else clip_gate(g_gamma)
    g_cum = None if g is None else chunk_local_cumsum(clip_gate(g), C, cu_seqlens=cu_seqlens, **_PALLAS)
    # Gates per channel have a place of their own among the arguments of the states.
    per_head, per_channel = (None, g_cum) if g is not None and g.ndim == 4 else (g_cum, None)
    h, final_state = chunk_fwd_h(
        k, v, per_head, g_gamma, per_channel, initial_state, output_final_state, cu_seqlens, C, **_PALLAS
    )
    o = chunk_fwd_o(q, k, v, h, g_cum, g_gamma, scale, cu_seqlens, C, **_PALLAS)
    return o.astype(v.dtype), final_state
