"""M_ij = beta_i <k_i, k_j> exp(G_i - G_j) for i > j: tile mathematics, kernel body, launcher."""

import jax
import jax.numpy as jnp
from chunkwise.kkt.config import Config
from chunkwise.shared import (
    dot_nt,
    head_block,
    out_struct,
    pair_decay,
    pallas_call,
    repeat_heads,
    strictly_lower,
    to_column,
)
from jax.experimental import pallas as pl


def kkt_tile(k, beta_col, decay):
    """Return the strictly lower interaction matrix of one chunk.

    Args:
      k: [h, C, K], keys of the key heads.
      beta_col: [HV, C, 1].
      decay: [HV, C, C], e^(G_i - G_j) where the pair interacts (i > j), else 0.

    Returns:
      [HV, C, C] float32.
    """
    return beta_col * decay * repeat_heads(dot_nt(k, k), beta_col.shape[0])


def _kkt_kernel(k_ref, beta_ref, g_ref, A_ref):
    g = g_ref[...]
    decay = pair_decay(to_column(g), g, strictly_lower(g.shape[-1]))
    A_ref[...] = kkt_tile(k_ref[...], to_column(beta_ref[...]), decay)


def launch(k: jax.Array, beta: jax.Array, g: jax.Array, config: Config) -> jax.Array:
    """Run the kernel on chunks: k [NC, H, C, K], beta and g [NC, HV, 1, C] -> A [NC, HV, C, C]."""
    NC, H, C, K = k.shape
    HV, heads = beta.shape[1], config.heads
    return pallas_call(
        _kkt_kernel,
        k,
        beta,
        g,
        name=f"chunk_scaled_dot_kkt_fwd_c{C}",
        # Chunks and blocks of heads are independent: no state is carried.
        grid=(NC, HV // heads),
        dimension_semantics=("parallel", "parallel"),
        in_specs=[head_block(heads, C, K, group=HV // H), head_block(heads, 1, C), head_block(heads, 1, C)],
        out_specs=head_block(heads, C, C),
        out_shape=out_struct((NC, HV, C, C), jnp.float32, k, beta, g),
        cost_estimate=pl.CostEstimate(
            flops=2 * NC * H * C * C * K,
            transcendentals=NC * HV * C * C,
            bytes_accessed=k.size * k.dtype.itemsize + 8 * NC * HV * C + 4 * NC * HV * C * C,
        ),
    )
