"""o = scale (e^G q S + P v), P_ij = <q_i, e^(G_i - G_j) k_j>, i >= j: tile mathematics, launcher."""

import jax
import jax.numpy as jnp

from chunkwise.chunk_o.config import Config
from chunkwise.shared.kernels import decay_from_start, decayed_scores, dot, gate_kind, map_chunks, repeat_heads


def output_tile(q, k, v, h, from_start, scores, scale):
    """Return the output of one chunk.

    Args:
      q, k: [h, C, K], queries and keys of the key heads.
      v: [HV, C, V].
      h: [HV, K, V], the state before the chunk.
      from_start: [HV, C, 1 or K], the decay e^G from the start of the chunk to each token.
      scores: [HV, C, C], the decayed products of queries and keys for i > j, else 0.
      scale: multiplies the output.

    Returns:
      [HV, C, V] float32.
    """
    HV = v.shape[0]
    # A token reads its own value undecayed.
    own = repeat_heads(jnp.sum(q.astype(jnp.float32) * k.astype(jnp.float32), axis=2, keepdims=True), HV)
    return scale * (dot(repeat_heads(q, HV) * from_start, h) + dot(scores, v) + own * v)


def output_gates_tile(scale, q, k, v, h, g):
    """Return `output_tile` from cumulative gates, rows [HV, 1, C] or per channel [HV, C, K], as a tuple of one."""
    return (output_tile(q, k, v, h, decay_from_start(g), decayed_scores(q, k, g), scale),)


def launch(q, k, v, h, g, scale: jax.Array, config: Config) -> jax.Array:
    """Run the kernel on chunks.

    q, k [NC, H, C, K], v [NC, HV, C, V], h [NC, HV, K, V], g rows or channels, scale float32 [1] ->
    o [NC, HV, C, V] in the type of v.
    """
    NC, HV, C, V = v.shape
    K = k.shape[-1]
    (o,) = map_chunks(
        output_gates_tile,
        q,
        k,
        v,
        h,
        g,
        scalars=(scale,),
        name=f"chunk_fwd_o_fwd_c{C}{gate_kind(g)}",
        HV=HV,
        heads=config.heads,
        outputs=[((C, V), v.dtype)],
        flops=2 * NC * HV * C * (C * K + K * V + C * V),
        transcendentals=NC * HV * C * C,
    )
    return o
