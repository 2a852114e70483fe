"""JAXBench's task 16p_Mamba2_SSD: `python -m JAXBench evaluate --workload 16p_Mamba2_SSD --kernel THIS`.

The scores of a query are divided by their sum, which is an output too: the value of a further column of ones.
"""

import jax
import jax.numpy as jnp

from chunkwise.fused_gla import chunk_simple_gla


def workload(query: jax.Array, key: jax.Array, value: jax.Array, A_log: jax.Array) -> jax.Array:
    """Return the outputs [B, H, S, D] of Mamba-2's state space layer with divided scores.

    Args:
      query, key, value: [B, H, S, D].
      A_log: [B, H, S], of which the decay is the sigmoid.
    """
    S, D = value.shape[2:]
    # Every head as a row of one head: the tensors need not be turned.
    q, k, v = (x.reshape(-1, S, 1, D) for x in (query, key, value))
    g = jnp.log(jax.nn.sigmoid(A_log) + 1e-8).reshape(-1, S, 1)
    # As many ones as fill the lanes of a TPU. Outputs have the type of the values: rounded to bfloat16 before they are
    # divided, 7 of a million are further from the reference than its check allows.
    values = jnp.concatenate([v, jnp.ones_like(v)], axis=-1).astype(jnp.float32)
    o, _ = chunk_simple_gla(q, k, values, g, scale=1.0, chunk_size=128)
    o = o[..., :D] / jnp.maximum(jnp.abs(o[..., D:]), 1.0)
    return o.astype(query.dtype).reshape(query.shape)
