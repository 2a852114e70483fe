"""The gradient of A_ij = beta_i <k_i, k_j> e^(G_i - G_j), i > j: tile mathematics, launcher.

With W_ij = dA_ij e^(G_i - G_j) and S = k k^T: dk = (beta W) k + (beta W)^T k, dbeta_i = sum_j W_ij S_ij, and
dG is the row sums less the column sums of dA * A.
"""

import jax
import jax.numpy as jnp

from chunkwise.kkt.config import Config
from chunkwise.shared import (
    dot,
    dot_nt,
    dot_tn,
    map_chunks,
    pair_decay,
    repeat_heads,
    strictly_lower,
    sum_groups,
    to_column,
    to_row,
)


def kkt_bwd_tile(k, beta, g, dA):
    """Return dk [HV, C, K], dbeta and dg [HV, 1, C] from k [h, C, K], rows beta and g, and dA [HV, C, C]."""
    k = repeat_heads(k, beta.shape[0])
    beta_col = to_column(beta)
    W = dA * pair_decay(to_column(g), g, strictly_lower(g.shape[-1]))
    WS = W * dot_nt(k, k)
    dbeta = jnp.sum(WS, axis=2, keepdims=True)
    dS = beta_col * W
    dk = dot(dS, k) + dot_tn(dS, k)
    dg = to_row(beta_col * dbeta) - jnp.sum(beta_col * WS, axis=1, keepdims=True)
    return dk, to_row(dbeta), dg


def launch(k: jax.Array, beta: jax.Array, g: jax.Array, dA: jax.Array, config: Config):
    """Run the kernel on chunks, operands as in the forward: returns dk in the type of k, dbeta and dg."""
    NC, H, C, K = k.shape
    HV = beta.shape[1]
    dk, dbeta, dg = map_chunks(
        kkt_bwd_tile,
        k,
        beta,
        g,
        dA,
        name=f"chunk_scaled_dot_kkt_bwd_c{C}",
        HV=HV,
        heads=config.heads,
        outputs=[((C, K), jnp.float32), ((1, C), jnp.float32), ((1, C), jnp.float32)],
        flops=6 * NC * HV * C * C * K,
        transcendentals=NC * HV * C * C,
    )
    return sum_groups(dk, H).astype(k.dtype), dbeta, dg
