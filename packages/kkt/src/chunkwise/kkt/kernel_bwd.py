"""The gradient of A_ij = beta_i <k_i, e^(G_i - G_j) k_j>, i > j: tile mathematics, launcher."""

import jax
import jax.numpy as jnp

from chunkwise.kkt.config import Config
from chunkwise.shared.kernels import (
    decayed_scores,
    decayed_scores_bwd,
    gate_kind,
    map_chunks,
    repeat_heads,
    sum_groups,
    to_column,
    to_row,
)


def kkt_bwd_tile(k, beta, g, dA):
    """Return dk [HV, C, K], dbeta [HV, 1, C] and dg in the form of g; operands as in the forward, dA [HV, C, C]."""
    dbeta = jnp.sum(dA * decayed_scores(k, k, g), axis=2, keepdims=True)
    k = repeat_heads(k, beta.shape[0])
    # Every key is once the row and once the column.
    dk_row, dk_column, dg = decayed_scores_bwd(k, k, g, to_column(beta) * dA)
    return dk_row + dk_column, to_row(dbeta), dg


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
        name=f"chunk_scaled_dot_kkt_bwd_c{C}{gate_kind(g)}",
        HV=HV,
        heads=config.heads,
        outputs=[((C, K), jnp.float32), ((1, C), jnp.float32), (g.shape[2:], jnp.float32)],
        flops=6 * NC * HV * C * C * K,
        transcendentals=NC * HV * C * C,
    )
    return sum_groups(dk, H).astype(k.dtype), dbeta, dg
