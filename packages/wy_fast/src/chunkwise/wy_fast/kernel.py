"""w = A_inv (beta e^G k), u = A_inv (beta v): tile mathematics, kernel body, launcher."""

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from chunkwise.shared import dot, head_block, out_struct, pallas_call, repeat_heads
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


def _wy_kernel(k_ref, v_ref, A_inv_ref, beta_ref, g_ref, w_ref, u_ref):
    w, u = wy_tile(k_ref[...], v_ref[...], A_inv_ref[...], beta_ref[...], jnp.exp(g_ref[...]))
    w_ref[...] = w
    u_ref[...] = u


def launch(
    k: jax.Array, v: jax.Array, A_inv: jax.Array, beta: jax.Array, g: jax.Array, config: Config
) -> tuple[jax.Array, jax.Array]:
    """Run the kernel on chunks.

    k [NC, H, C, K], v [NC, HV, C, V], A_inv [NC, HV, C, C], beta and g [NC, HV, 1, C] ->
    w [NC, HV, C, K] and u [NC, HV, C, V], float32.
    """
    NC, H, C, K = k.shape
    _, HV, _, V = v.shape
    heads = config.heads
    return pallas_call(
        _wy_kernel,
        k,
        v,
        A_inv,
        beta,
        g,
        name=f"recompute_w_u_fwd_c{C}",
        # Chunks and blocks of heads are independent: no state is carried.
        grid=(NC, HV // heads),
        dimension_semantics=("parallel", "parallel"),
        in_specs=[
            head_block(heads, C, K, group=HV // H),
            head_block(heads, C, V),
            head_block(heads, C, C),
            head_block(heads, 1, C),
            head_block(heads, 1, C),
        ],
        out_specs=[head_block(heads, C, K), head_block(heads, C, V)],
        out_shape=[
            out_struct((NC, HV, C, K), jnp.float32, k, v, A_inv, beta, g),
            out_struct((NC, HV, C, V), jnp.float32, k, v, A_inv, beta, g),
        ],
        cost_estimate=pl.CostEstimate(
            flops=2 * NC * HV * C * C * (K + V),
            transcendentals=NC * HV * C,
            bytes_accessed=k.nbytes + v.nbytes + A_inv.nbytes + 4 * NC * HV * C * (K + V + 2),
        ),
    )
