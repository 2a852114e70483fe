"""o = scale (e^G (q S) + P v), P_ij = <q_i, k_j> e^(G_i - G_j), i >= j: tile mathematics, launcher."""

import jax
import jax.numpy as jnp

from chunkwise.chunk_o.config import Config
from chunkwise.shared import dot, dot_nt, lower, map_chunks, pair_decay, repeat_heads, to_column


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


def output_rows_tile(scale, q, k, v, h, g):
    """Return `output_tile` from cumulative gates g [HV, 1, C]."""
    g_col = to_column(g)
    return (output_tile(q, k, v, h, jnp.exp(g_col), pair_decay(g_col, g, lower(g.shape[-1])), scale),)


def launch(q, k, v, h, g, scale: jax.Array, config: Config) -> jax.Array:
    """Run the kernel on chunks.

    q, k [NC, H, C, K], v [NC, HV, C, V], h [NC, HV, K, V], g [NC, HV, 1, C], scale float32 [1] ->
    o [NC, HV, C, V] in the type of q.
    """
    NC, HV, C, V = v.shape
    K = k.shape[-1]
    (o,) = map_chunks(
        output_rows_tile,
        q,
        k,
        v,
        h,
        g,
        scalars=(scale,),
        name=f"chunk_fwd_o_fwd_c{C}",
        HV=HV,
        heads=config.heads,
        outputs=[((C, V), q.dtype)],
        flops=2 * NC * HV * C * (C * K + K * V + C * V),
        transcendentals=NC * HV * C * C,
    )
    return o
