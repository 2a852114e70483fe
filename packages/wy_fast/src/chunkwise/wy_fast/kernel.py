"""w = A_inv (beta e^G k), u = A_inv (beta v): tile mathematics, launcher."""

import jax
import jax.numpy as jnp

from chunkwise.shared.kernels import decay_from_start, dot, gate_kind, map_chunks, repeat_heads
from chunkwise.wy_fast.config import Config


def wy_tile(k, v, A_inv, beta, from_start):
    """Return the effective keys and values of one chunk.

    Args:
      k: [h, C, K], keys of the key heads.
      v: [HV, C, V].
      A_inv: [HV, C, C].
      beta: [HV, 1, C]; it multiplies the columns of A_inv.
      from_start: [HV, C, 1 or K], the decay e^G from the start of the chunk to each token.

    Returns:
      w [HV, C, K] and u [HV, C, V], float32.
    """
    scaled = A_inv * beta
    return dot(scaled, repeat_heads(k, v.shape[0]) * from_start), dot(scaled, v)


def wy_gates_tile(k, v, A_inv, beta, g):
    """Return `wy_tile` from cumulative gates, rows [HV, 1, C] or per channel [HV, C, K]."""
    return wy_tile(k, v, A_inv, beta, decay_from_start(g))


def launch(
    k: jax.Array, v: jax.Array, A_inv: jax.Array, beta: jax.Array, g: jax.Array, config: Config
) -> tuple[jax.Array, jax.Array]:
    """Run the kernel on chunks.

    k [NC, H, C, K], v [NC, HV, C, V], A_inv [NC, HV, C, C], beta [NC, HV, 1, C], g rows or channels ->
    w [NC, HV, C, K] and u [NC, HV, C, V], float32.
    """
    NC, HV, C, V = v.shape
    K = k.shape[-1]
    w, u = map_chunks(
        wy_gates_tile,
        k,
        v,
        A_inv,
        beta,
        g,
        name=f"recompute_w_u_fwd_c{C}{gate_kind(g)}",
        HV=HV,
        heads=config.heads,
        outputs=[((C, K), jnp.float32), ((C, V), jnp.float32)],
        flops=2 * NC * HV * C * C * (K + V),
        transcendentals=g.size,
    )
    return w, u
