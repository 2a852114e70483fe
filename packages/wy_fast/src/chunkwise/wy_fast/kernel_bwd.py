"""The gradient of w = Q (e^G k) and u = Q v, Q = A_inv beta by columns: tile mathematics, launcher.

dQ = dw (e^G k)^T + du v^T, e^G dk = Q^T dw, dv = Q^T du, and beta sums over its column what it multiplies.
"""

import jax
import jax.numpy as jnp

from chunkwise.shared.kernels import (
    decay_from_start,
    dot_nt,
    dot_tn,
    gate_gradient,
    gate_kind,
    map_chunks,
    repeat_heads,
    sum_groups,
)
from chunkwise.wy_fast.config import Config


def wy_bwd_tile(k, v, A_inv, beta, g, dw, du):
    """Return dk [HV, C, K], dv [HV, C, V], dA_inv [HV, C, C], dbeta [HV, 1, C] and dg; operands as in the forward."""
    from_start = decay_from_start(g)
    decayed = repeat_heads(k, v.shape[0]) * from_start
    scaled = A_inv * beta
    dscaled = dot_nt(dw, decayed) + dot_nt(du, v)
    ddecayed = dot_tn(scaled, dw)
    dbeta = jnp.sum(A_inv * dscaled, axis=1, keepdims=True)
    dg = gate_gradient(decayed * ddecayed, g)
    return from_start * ddecayed, dot_tn(scaled, du), beta * dscaled, dbeta, dg


def launch(k, v, A_inv, beta, g, dw: jax.Array, du: jax.Array, config: Config):
    """Run the kernel on chunks: the gradients of all operands of the forward, in their types."""
    NC, HV, C, V = v.shape
    H, K = k.shape[1], k.shape[3]
    dk, dv, dA_inv, dbeta, dg = map_chunks(
        wy_bwd_tile,
        k,
        v,
        A_inv,
        beta,
        g,
        dw,
        du,
        name=f"recompute_w_u_bwd_c{C}{gate_kind(g)}",
        HV=HV,
        heads=config.heads,
        outputs=[
            ((C, K), jnp.float32),
            ((C, V), v.dtype),
            ((C, C), jnp.float32),
            ((1, C), jnp.float32),
            (g.shape[2:], jnp.float32),
        ],
        flops=4 * NC * HV * C * C * (K + V),
        transcendentals=g.size,
    )
    return sum_groups(dk, H).astype(k.dtype), dv, dA_inv, dbeta, dg
