"""o = scale (e^G (q S) + P v), P_ij = <q_i, k_j> e^(G_i - G_j), i >= j: tile mathematics, kernel body, launcher."""

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from chunkwise.chunk_o.config import Config
from chunkwise.shared import (
    dot,
    dot_nt,
    head_block,
    lower,
    out_struct,
    pair_decay,
    pallas_call,
    repeat_heads,
    to_column,
)


def output_tile(q, k, v, h, from_start_col, decay, scale):
    """Return the output of one chunk.

    Args:
      q, k: [h, C, K], queries and keys of the key heads.
      v: [HV, C, V].
      h: [HV, K, V], the state before the chunk.
      from_start_col: [HV, C, 1], the decay e^G from the start of the chunk to each token.
      decay: [HV, C, C], e^(G_i - G_j) where the pair interacts (i >= j), else 0.
      scale: multiplies the output.

    Returns:
      [HV, C, V] float32.
    """
    HV = v.shape[0]
    scores = decay * repeat_heads(dot_nt(q, k), HV)
    carried = from_start_col * dot(repeat_heads(q, HV), h)
    return scale * (carried + dot(scores, v))


def _output_kernel(scale_ref, q_ref, k_ref, v_ref, h_ref, g_ref, o_ref):
    g_row = g_ref[...]
    g_col = to_column(g_row)
    decay = pair_decay(g_col, g_row, lower(g_row.shape[-1]))
    o = output_tile(q_ref[...], k_ref[...], v_ref[...], h_ref[...], jnp.exp(g_col), decay, scale_ref[0])
    o_ref[...] = o.astype(o_ref.dtype)


def launch(
    q: jax.Array, k: jax.Array, v: jax.Array, h: jax.Array, g: jax.Array, scale: jax.Array, config: Config
) -> jax.Array:
    """Run the kernel on chunks.

    q, k [NC, H, C, K], v [NC, HV, C, V], h [NC, HV, K, V], g [NC, HV, 1, C], scale float32 [1] ->
    o [NC, HV, C, V] in the type of q.
    """
    NC, H, C, K = k.shape
    _, HV, _, V = v.shape
    heads, group = config.heads, HV // H
    return pallas_call(
        _output_kernel,
        scale,
        q,
        k,
        v,
        h,
        g,
        name=f"chunk_fwd_o_fwd_c{C}",
        # The scale may be traced, so it is an operand, a scalar in SMEM.
        num_scalar_prefetch=1,
        # Chunks and blocks of heads are independent: every chunk has its state at hand.
        grid=(NC, HV // heads),
        dimension_semantics=("parallel", "parallel"),
        in_specs=[
            head_block(heads, C, K, group=group),
            head_block(heads, C, K, group=group),
            head_block(heads, C, V),
            head_block(heads, K, V),
            head_block(heads, 1, C),
        ],
        out_specs=head_block(heads, C, V),
        out_shape=out_struct(v.shape, q.dtype, q, k, v, h, g),
        cost_estimate=pl.CostEstimate(
            flops=2 * NC * HV * C * (C * K + K * V + C * V),
            transcendentals=NC * HV * C * C,
            bytes_accessed=2 * q.nbytes + k.nbytes + v.nbytes + h.nbytes + g.nbytes,
        ),
    )
