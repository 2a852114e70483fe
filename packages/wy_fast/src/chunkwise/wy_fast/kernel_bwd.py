"""The gradient of w = P k and u = Q v, Q = A_inv beta, P = Q e^G by columns: tile mathematics, launcher.

With dP = dw k^T and dQ = du v^T: dk = P^T dw, dv = Q^T du, and the scalars of a column sum what it is multiplied by.
"""

import jax
import jax.numpy as jnp

from chunkwise.shared import dot_nt, dot_tn, map_chunks, repeat_heads, sum_groups
from chunkwise.wy_fast.config import Config


def wy_bwd_tile(k, v, A_inv, beta, g, dw, du):
    """Return dk [HV, C, K], dv [HV, C, V], dA_inv [HV, C, C], dbeta and dg [HV, 1, C]; operands as in the forward."""
    from_start = jnp.exp(g)
    Q = A_inv * beta
    # The decay multiplies the cotangent: one matrix serves w and u.
    dP = dot_nt(dw, repeat_heads(k, beta.shape[0])) * from_start
    dQ = dP + dot_nt(du, v)
    dk = dot_tn(Q * from_start, dw)
    dbeta = jnp.sum(A_inv * dQ, axis=1, keepdims=True)
    dg = jnp.sum(Q * dP, axis=1, keepdims=True)
    return dk, dot_tn(Q, du), beta * dQ, dbeta, dg


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
        name=f"recompute_w_u_bwd_c{C}",
        HV=HV,
        heads=config.heads,
        outputs=[
            ((C, K), jnp.float32),
            ((C, V), v.dtype),
            ((C, C), jnp.float32),
            ((1, C), jnp.float32),
            ((1, C), jnp.float32),
        ],
        flops=4 * NC * HV * C * C * (K + V),
        transcendentals=NC * HV * C,
    )
    return sum_groups(dk, H).astype(k.dtype), dv, dA_inv, dbeta, dg
