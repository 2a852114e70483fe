"""The operators as chains of stage kernels: the readable form, and the cross-check of the fused kernels."""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from chunkwise.chunk_h import chunk_fwd_h, chunk_gated_delta_rule_fwd_h
from chunkwise.chunk_o import chunk_fwd_o
from chunkwise.cumsum import chunk_local_cumsum
from chunkwise.kkt import chunk_scaled_dot_kkt
from chunkwise.shared.kernels import clip_gate
from chunkwise.shared.operators import Arguments, Options, unit_rows
from chunkwise.solve_tril import solve_tril
from chunkwise.wy_fast import recompute_w_u

_PALLAS: dict[str, Any] = {"implementation": "pallas"}


@functools.partial(jax.jit, static_argnums=1)
def delta_rule(x: Arguments, options: Options) -> tuple[jax.Array, jax.Array | None]:
    """Gated delta rule for gates per head g [B, T, HV], Kimi delta attention for gates per channel [B, T, HV, K]."""
    assert x.g is not None
    assert x.beta is not None
    cu, C = x.cu_seqlens, options.chunk_size
    q, k = (unit_rows(y, options.normalise, cu) for y in (x.q, x.k))
    g_cum = chunk_local_cumsum(clip_gate(x.g), C, cu_seqlens=cu, **_PALLAS)
    A = chunk_scaled_dot_kkt(k, x.beta, g_cum, cu, C, **_PALLAS)
    A_inv = solve_tril(A, cu, **_PALLAS)
    w, u = recompute_w_u(k, x.v, x.beta, A_inv, g_cum, cu, **_PALLAS)
    h, v_new, final_state = chunk_gated_delta_rule_fwd_h(
        k, w, u, g_cum, x.initial_state, options.output_final_state, cu, C, **_PALLAS
    )
    o = chunk_fwd_o(q, k, v_new, h, g_cum, None, _scale(x), cu, C, **_PALLAS)
    return o.astype(x.v.dtype), final_state


@functools.partial(jax.jit, static_argnums=1)
def gla(x: Arguments, options: Options) -> tuple[jax.Array, jax.Array | None]:
    """Gated linear attention for gates per head [B, T, HV], constant per head [HV], or per channel [B, T, HV, K]."""
    cu, C = x.cu_seqlens, options.chunk_size
    g_gamma = None if x.g_gamma is None else clip_gate(x.g_gamma)
    g_cum = None if x.g is None else chunk_local_cumsum(clip_gate(x.g), C, cu_seqlens=cu, **_PALLAS)
    # The states take gates per channel as another argument.
    per_head, per_channel = (None, g_cum) if x.g is not None and x.g.ndim == 4 else (g_cum, None)
    h, final_state = chunk_fwd_h(
        x.k, x.v, per_head, g_gamma, per_channel, x.initial_state, options.output_final_state, cu, C, **_PALLAS
    )
    o = chunk_fwd_o(x.q, x.k, x.v, h, g_cum, g_gamma, _scale(x), cu, C, **_PALLAS)
    return o.astype(x.v.dtype), final_state


def _scale(x: Arguments) -> Any:
    """Return the scale as float32: under jit it is traced, and in 64-bit mode a number would be float64."""
    return jnp.asarray(x.scale, jnp.float32)
