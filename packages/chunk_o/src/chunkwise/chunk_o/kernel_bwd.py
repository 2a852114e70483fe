"""The gradient of o = scale (e^G q S + P v), P_ij = <q_i, e^(G_i - G_j) k_j>, i >= j: tile mathematics, launcher.

With dP = scale do v^T: dv = P^T (scale do), dh = (e^G q)^T (scale do), and P passes dP on to q, k and G.
"""

import jax
import jax.numpy as jnp

from chunkwise.chunk_o.config import Config
from chunkwise.shared.kernels import (
    decay_from_start,
    decayed_scores,
    decayed_scores_bwd,
    dot_nt,
    dot_tn,
    gate_gradient,
    gate_kind,
    map_chunks,
    repeat_heads,
    sum_groups,
)


def output_bwd_tile(scale, q, k, v, h, g, do):
    """Return dq, dk [HV, C, K], dv [HV, C, V], dh [HV, K, V] and dg; operands as in the forward."""
    HV = v.shape[0]
    scores = decayed_scores(q, k, g)
    q, k = (repeat_heads(x, HV).astype(jnp.float32) for x in (q, k))
    from_start = decay_from_start(g)
    do = scale * do.astype(jnp.float32)
    dq, dk, dg = decayed_scores_bwd(q, k, g, dot_nt(do, v))
    own, down = jnp.sum(q * k, axis=2, keepdims=True), jnp.sum(do * v, axis=2, keepdims=True)
    carried = from_start * dot_nt(do, h)
    dv = dot_tn(scores, do) + own * do
    dh = dot_tn(from_start * q, do)
    return dq + carried + down * k, dk + down * q, dv, dh, dg + gate_gradient(q * carried, g)


def launch(q, k, v, h, g, scale: jax.Array, do: jax.Array, config: Config):
    """Run the kernel on chunks: the gradients of all operands of the forward but the scale, in their types."""
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
        name=f"chunk_fwd_o_bwd_c{C}{gate_kind(g)}",
        HV=HV,
        heads=config.heads,
        outputs=[
            ((C, K), jnp.float32),
            ((C, K), jnp.float32),
            ((C, V), v.dtype),
            ((K, V), jnp.float32),
            (g.shape[2:], jnp.float32),
        ],
        flops=2 * NC * HV * C * (3 * C * K + 2 * C * V + 2 * K * V),
        transcendentals=NC * HV * C * C,
    )
    return sum_groups(dq, H).astype(q.dtype), sum_groups(dk, H).astype(k.dtype), dv, dh, dg
