"""w = A_inv (beta e^G k), u = A_inv (beta v): tile mathematics, launcher."""

import jax
import jax.numpy as jnp

from chunkwise.shared import dot, map_chunks, repeat_heads
from chunkwise.wy_fast.config import Config


def wy_tile(k, v, A_inv, beta_row, from_start_row):
    """Return the effective keys and values of one chunk.

    The scalars multiply the columns of A_inv: C * C products instead of C * K.

    Args:
      k: [h, C, K], keys of the key heads.
      v: [HV, C, V].
      A_inv: [HV, C, C].
      beta_row: [HV, 1, C].
      from_start_row: [HV, 1, C], the decay e^G from the start of the chunk to each token.

    Returns:
      w [HV, C, K] and u [HV, C, V], float32.
    """
    scaled = A_inv * beta_row
    w = dot(scaled * from_start_row, repeat_heads(k, v.shape[0]))
    return w, dot(scaled, v)


def wy_rows_tile(k, v, A_inv, beta, g):
    """Return `wy_tile` from cumulative gates g [HV, 1, C]."""
    return wy_tile(k, v, A_inv, beta, jnp.exp(g))


def launch(
    k: jax.Array, v: jax.Array, A_inv: jax.Array, beta: jax.Array, g: jax.Array, config: Config
) -> tuple[jax.Array, jax.Array]:
    """Run the kernel on chunks.

    k [NC, H, C, K], v [NC, HV, C, V], A_inv [NC, HV, C, C], beta and g [NC, HV, 1, C] ->
    w [NC, HV, C, K] and u [NC, HV, C, V], float32.
    """
    NC, HV, C, V = v.shape
    K = k.shape[-1]
    w, u = map_chunks(
        wy_rows_tile,
        k,
        v,
        A_inv,
        beta,
        g,
        name=f"recompute_w_u_fwd_c{C}",
        HV=HV,
        heads=config.heads,
        outputs=[((C, K), jnp.float32), ((C, V), jnp.float32)],
        flops=2 * NC * HV * C * C * (K + V),
        transcendentals=NC * HV * C,
    )
    return w, u
