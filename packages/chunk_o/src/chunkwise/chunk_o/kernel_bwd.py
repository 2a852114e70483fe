"""The gradient of o = scale (e^G (q S) + P v), P_ij = <q_i, k_j> e^(G_i - G_j), i >= j: tile mathematics, launcher.

With dP = scale do v^T: dv = P^T (scale do), dh = (e^G q)^T (scale do), and P's decays pass dP on to q and k. dG is what
P and e^G (q S) pass on, row sums less column sums; the diagonal of P does not depend on the gates.
"""

import jax
import jax.numpy as jnp

from chunkwise.chunk_o.config import Config
from chunkwise.shared import (
    dot,
    dot_nt,
    dot_tn,
    lower,
    map_chunks,
    pair_decay,
    repeat_heads,
    strictly_lower,
    sum_groups,
    to_column,
    to_row,
)


def output_bwd_tile(scale, q, k, v, h, g, do):
    """Return dq, dk [HV, C, K], dv [HV, C, V], dh [HV, K, V] and dg [HV, 1, C]; operands as in the forward."""
    HV, C, _ = v.shape
    q, k = repeat_heads(q, HV), repeat_heads(k, HV)
    g_col = to_column(g)
    from_start, decay = jnp.exp(g_col), pair_decay(g_col, g, lower(C))
    do = scale * do.astype(jnp.float32)
    dqk = dot_nt(do, v) * decay
    qk = dot_nt(q, k)
    carried = from_start * dot_nt(do, h)
    dq = carried + dot(dqk, k)
    through = jnp.where(strictly_lower(C), dqk * qk, 0.0)
    dg_col = jnp.sum(through, axis=2, keepdims=True) + jnp.sum(q * carried, axis=2, keepdims=True)
    dg = to_row(dg_col) - jnp.sum(through, axis=1, keepdims=True)
    return dq, dot_tn(dqk, q), dot_tn(qk * decay, do), dot_tn(from_start * q, do), dg


def launch(q, k, v, h, g, scale: jax.Array, do: jax.Array, config: Config):
    """Run the kernel on chunks: the gradients of all operands of the forward, in their types."""
    NC, HV, C, V = v.shape
    H, K = k.shape[1], k.shape[3]
    dq, dk, dv, dh, dg = map_chunks(
        output_bwd_tile,
        q,
        k,
        v,
        h,
        g,
        do,
        scalars=(scale,),
        name=f"chunk_fwd_o_bwd_c{C}",
        HV=HV,
        heads=config.heads,
        outputs=[
            ((C, K), jnp.float32),
            ((C, K), jnp.float32),
            ((C, V), v.dtype),
            ((K, V), jnp.float32),
            ((1, C), jnp.float32),
        ],
        flops=2 * NC * HV * C * (3 * C * K + 2 * C * V + 2 * K * V),
        transcendentals=NC * HV * C * C,
    )
    dq, dk = sum_groups(dq, H), sum_groups(dk, H)
    # The output is linear in q and in the scale.
    dscale = jnp.sum(q * dq)[None] / scale
    return dq.astype(q.dtype), dk.astype(k.dtype), dv, dh, dg, dscale
